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
from .edges import arguments_of, edges, times, with_others

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


state("aten.native_batch_norm", "aten._native_batch_norm_legit",
      "aten._native_batch_norm_legit_functional", kind="normalisation")  # fmt: skip


@rule(*sorted(WITH_STATISTICS), kind="normalisation")
def norm_with_statistics(
    semantics: Semantics,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Any = None,
    var: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Each channel has one free scale, in all samples or in each."""
    given = arguments_of(semantics, x, weight, bias, mean, var, *args, **kwargs)
    # (the form without training has no such argument)
    of_data = given.get("training", given.get("use_input_stats", False)) is not False
    frozen = isinstance(mean, Tensor | Weight) and not of_data
    alone = semantics.place.op == "aten.instance_norm"
    dims = [dim for dim in range(len(x.shape)) if dim != 1 and (dim or not alone)]
    names = first, second = [getattr(value, "buffer_name", None) for value in (mean, var)]
    if first and second and not semantics.exact_norms:
        ids = semantics.activation(x)
        semantics.statistics_of(first, second, ids.transpose(0, 1), float(given["eps"]))
        out = semantics.cut(ids, dims, exact=frozen)
    elif (first and second) or not frozen:
        out = _cut(semantics, x, dims)
    else:
        for name in names:
            if name is not None:
                semantics.read(name)
        fixed = [semantics.activation(value) for value in (x, mean, var)]
        semantics.pin(fixed, "frozen statistics that are not whole buffers are constants")
        out = constant(x.shape)
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
