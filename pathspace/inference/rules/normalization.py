"""Normalisation layers, whose result does not depend on the scale of their
input, exactly if ``eps`` is 0.

Elements that are normalised together must share one scale, which the result does not have; gamma
and beta are edges from the root to the result's units. With ``norm_eps="respect"`` the scale of
the input is fixed instead.

With running statistics instead of those of the batch, ``(x - mean) / sqrt(var + eps)``, this is
exact for any ``eps``: ``mean`` scales with the channel and ``var + eps`` with its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import Value, Weight, constant, reshaped
from .edges import edges, times, with_others

# operations that take running mean and variance as their operands 3 and 4
WITH_STATISTICS = frozenset(
    ["aten.batch_norm", "aten._native_batch_norm_legit_no_training", "aten.instance_norm"]
)


def _cut(semantics: Semantics, x: Value, dims: Sequence[int]) -> Tensor:
    if semantics.exact_norms:
        ids = semantics.activation(x)
        semantics.pin(
            [ids], "normalisation with eps > 0, which norm_eps='respect' takes at its word"
        )
        return constant(ids.shape)
    return semantics.cut(x, dims)


def affine(
    semantics: Semantics, out: Tensor, weight: Value | None, bias: Value | None, dims: Sequence[int]
) -> Tensor:
    """``gamma * out + beta``, with the parameters along ``dims``."""
    shape = [
        out.shape[dim] if dim in {d % out.dim() for d in dims} else 1 for dim in range(out.dim())
    ]
    if isinstance(weight, Weight):
        out = edges(semantics, weight.moved(lambda t: t.reshape(shape), semantics.offsets), out, ())
    elif weight is not None:
        out = times(semantics, out, reshaped(weight, shape))
    if bias is not None:
        out = semantics.join(out, reshaped(semantics.activation(bias), shape))
    return out


def _by_statistics(
    semantics: Semantics,
    x: Value,
    mean: Any,
    var: Any,
    frozen: bool,
    dims: Sequence[int],
    eps: float,
) -> Tensor:
    names = first, second = [getattr(value, "buffer_name", None) for value in (mean, var)]
    if first and second:
        ids = semantics.activation(x)
        if semantics.exact_norms:
            return _cut(semantics, ids, dims)
        semantics.statistics_of(first, second, ids.transpose(0, 1), float(eps))
        return semantics.cut(ids, dims, exact=frozen)
    if not frozen:
        return _cut(semantics, x, dims)
    for name in names:
        if name is not None:
            semantics.read(name)
    ids = semantics.activation(x)
    statistics = [semantics.activation(value) for value in (mean, var)]
    semantics.pin([ids, *statistics], "frozen statistics that are not whole buffers are constants")
    return constant(ids.shape)


state("aten.native_batch_norm", "aten._native_batch_norm_legit",
      "aten._native_batch_norm_legit_functional", kind="normalisation")  # fmt: skip


@rule(*sorted(WITH_STATISTICS - {"aten.instance_norm"}), kind="normalisation")
def batch_norm(
    semantics: Semantics,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Any = None,
    var: Any = None,
    training: Any = True,
    *args: Any,
) -> Any:
    """Each channel has one free scale over batch and space."""
    dims = [dim for dim in range(len(x.shape)) if dim != 1]
    # (the form without training has no such argument)
    fixed = semantics.place.op.endswith("no_training")
    frozen = isinstance(mean, Tensor | Weight) and (training is False or fixed)
    eps = args[0 if fixed else 1]
    out = _by_statistics(semantics, x, mean, var, frozen, dims, eps)
    return with_others(semantics, affine(semantics, out, weight, bias, [1]))


@rule("aten.layer_norm", kind="normalisation")
def layer_norm(
    semantics: Semantics,
    x: Value,
    shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    *args: Any,
) -> Any:
    """All normalised features of one token share one scale."""
    dims = list(range(-len(shape), 0))
    return affine(semantics, _cut(semantics, x, dims), weight, bias, dims)


@rule("aten.rms_norm", kind="normalisation", rotations=True)
def rms_norm(
    semantics: Semantics, x: Value, shape: Sequence[int], weight: Value | None = None, *args: Any
) -> Any:
    """All normalised features of one token share one scale."""
    return layer_norm(semantics, x, shape, weight)


@rule("aten.group_norm", kind="normalisation")
def group_norm(
    semantics: Semantics,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    *args: Any,
) -> Any:
    """The channels of a group share one scale per sample."""
    ids = semantics.activation(x)
    split = reshaped(ids, (ids.shape[0], groups, ids.shape[1] // groups, *ids.shape[2:]))
    out = _cut(semantics, split, list(range(2, split.dim()))).reshape(ids.shape)
    return affine(semantics, out, weight, bias, [1])


@rule("aten.instance_norm", kind="normalisation")
def instance_norm(
    semantics: Semantics,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Any,
    var: Any,
    use_input: bool,
    *args: Any,
) -> Tensor:
    """Every channel of every sample has a free scale, unless running statistics replace its own."""
    # (momentum, eps, ...)
    out = _by_statistics(
        semantics, x, mean, var, not use_input, list(range(2, len(x.shape))), args[1]
    )
    return affine(semantics, out, weight, bias, [1])


@rule("aten._weight_norm", kind="normalisation")
def weight_norm(semantics: Semantics, v: Value, g: Value, dim: int = 0) -> Any:
    """``g v / |v|`` with one norm along ``dim`` or for all; ``v`` is exactly free."""
    rank = len(v.shape)
    semantics.observe(semantics.reduce(v, [d for d in range(rank) if dim == -1 or d != dim % rank]))
    out = constant(v.shape)
    if dim in (0, rank - 1):
        # along the first and the last dimension torch reads the first elements of g, for any shape
        if prod(g.shape) != v.shape[dim]:
            semantics.pin([g], "a gain that is not one number for each norm")
            return out
        shape = [v.shape[d] if d == dim % rank else 1 for d in range(rank)]
        g = semantics.moved(lambda t: reshaped(t, shape), g)
    return edges(semantics, g, out, ()) if isinstance(g, Weight) else times(semantics, out, g)
