"""Tensors that are created: only the shapes of operands are used."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import NEUTRAL, Value, constant, shape_of


@rule("aten.zeros_like", "aten.new_zeros", kind="creation")
def zeros(semantics: Semantics, *args: Any, **kwargs: Any) -> Tensor:
    """Exact zeros, which have any scale."""
    return constant(shape_of(semantics.place.result), NEUTRAL)


@rule("aten.empty", "aten.empty_like", "aten.new_empty", "aten.new_empty_strided", "aten.ones_like",
      "aten.new_ones", "aten.full_like", "aten.new_full", kind="creation")  # fmt: skip
@rule("aten.rand", "aten.randn", "aten.randint", "aten.rand_like", "aten.randn_like",
      "aten.randint_like", "aten.randperm", "aten.normal_", "aten.normal_functional",
      "aten.uniform", "aten.exponential", "aten.random", "aten.bernoulli_",
      kind="random")  # fmt: skip
def made(semantics: Semantics, *args: Any, **kwargs: Any) -> Tensor:
    """A constant or random tensor."""
    return constant(shape_of(semantics.place.result))


@rule("aten.sym_size", "aten.size", "aten.sym_numel", "aten.numel", kind="size")
def size(semantics: Semantics, x: Value, dim: int | None = None) -> Any:
    """Sizes are plain numbers."""
    return semantics.place.result


@rule("aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range_for_size",
      "aten._assert_scalar", "aten.sym_constrain_range", kind="size")  # fmt: skip
def nothing(semantics: Semantics, *args: Any, **kwargs: Any) -> None:
    """Checks, which do not affect scales."""
