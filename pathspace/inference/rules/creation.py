"""Tensors that are created: only the shapes of operands are used."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..registry import rule
from ..semantics import Semantics, converted
from ..values import NEUTRAL, Value, Weight, constant, shape_of


@rule("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.zero", "aten.zero_", kind="creation")
def zeros(semantics: Semantics, *args: Any, **kwargs: Any) -> Tensor:
    """Exact zeros, which have any scale."""
    return constant(shape_of(semantics.place.result), NEUTRAL)


@rule(
    "aten.full",
    "aten.full_like",
    "aten.new_full",
    "aten.scalar_tensor",
    "aten.fill",
    "aten.fill_",
    kind="creation",
)
def full(semantics: Semantics, *args: Any, **kwargs: Any) -> Tensor:
    """A constant, or one activation everywhere; zero and infinity have any scale."""
    name = semantics.place.op.removeprefix("aten.")
    position = {"scalar_tensor": 0, "new_full": 2}.get(name, 1)
    value = (
        args[position] if len(args) > position else kwargs.get("fill_value", kwargs.get("value"))
    )
    shown = semantics.place.result
    if isinstance(value, Tensor | Weight):
        value = converted(semantics, value, shown.dtype)
    return semantics.activation(value).expand(shape_of(shown))


@rule(
    "aten.ones",
    "aten.ones_like",
    "aten.new_ones",
    "aten.empty",
    "aten.empty_like",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten.empty_strided",
    "aten.empty_permuted",
    "aten.arange",
    "aten.eye",
    "aten.hann_window",
    kind="creation",
)
@rule("aten.rand", "aten.randn", "aten.randint", "aten.rand_like", "aten.randn_like",
      "aten.randint_like",
      "aten.randperm", "aten.normal_", "aten.normal_functional", "aten.uniform", "aten.uniform_",
      "aten.exponential", "aten.exponential_", "aten.random", "aten.random_",
      kind="random")  # fmt: skip
def made(semantics: Semantics, *args: Any, **kwargs: Any) -> Tensor:
    """A constant or random tensor."""
    return constant(shape_of(semantics.place.result))


@rule("aten.linspace", "aten.logspace", kind="creation")
def spaced(semantics: Semantics, start: Any, end: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A range of numbers: evenly spaced numbers have the common scale of their ends."""
    ends = [semantics.activation(value) for value in (start, end)]
    if semantics.place.op == "aten.logspace":
        semantics.pin(ends, "not positively homogeneous")
    shown = semantics.place.result
    if any(isinstance(value, Tensor | Weight) for value in (start, end)):
        # (the numbers between the ends are rounded, too)
        ends = [semantics.activation(converted(semantics, semantics.join(*ends), shown.dtype))]
    return semantics.join(*ends).expand(shape_of(shown))


@rule("aten.bernoulli", "aten.bernoulli_", kind="random")
def bernoulli(semantics: Semantics, x: Value, p: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Random bits, with a given probability or with the operand as probabilities."""
    semantics.pin([semantics.activation(x if p is None else p)], "a probability")
    return constant(x.shape)


@rule("aten.sym_size", "aten.size", "aten.sym_numel", "aten.numel", kind="size")
def size(semantics: Semantics, x: Value, dim: int | None = None) -> Any:
    """Sizes are plain numbers."""
    return semantics.place.result


@rule("aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range_for_size",
      "aten._assert_scalar", "aten.sym_constrain_range", kind="size")  # fmt: skip
def nothing(semantics: Semantics, *args: Any, **kwargs: Any) -> None:
    """Checks, which do not affect scales."""
