"""Elements selected by position.

Constant positions (tables of relative positions, permutations) are treated exactly. Positions from
data are arbitrary, so all elements that they could select share one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import (
    NEUTRAL,
    Value,
    Weight,
    along,
    broadcast_shape,
    compress,
    constant,
    shape_of,
    value_of,
)
from .edges import arguments_of, edges, with_others

aten = torch.ops.aten
# properties of selection at constant positions
PICKED: dict[str, Any] = {
    "kind": "pick",
    "degree": (1,),
    "linear": "jointly",
    "coefficients": "one",
}
WRITTEN: dict[str, Any] = PICKED | {"kind": "write"}
Indices = Sequence[Tensor | None]


def _known(indices: Indices) -> list[Tensor | None] | None:
    """The positions, also in place of masks, if all of them are known."""
    found: list[Tensor | None] = []
    for index in indices:
        real = None if index is None else value_of(index)
        if index is not None and real is None:
            return None
        masks = real is not None and real.dtype == torch.bool and real.dim()
        found += real.nonzero(as_tuple=True) if masks and real is not None else [real]
    return [None if real is None else real.contiguous() for real in found]


def _node(semantics: Semantics, where: Callable[[Any], Any]) -> object:
    node = semantics.place.node
    return object() if node is None else where(node.args)


@rule("aten.index", "aten._unsafe_index", **PICKED)
def index(semantics: Semantics, x: Value, indices: Indices) -> Value:
    """``x[i, :, j]``."""
    shape, real = shape_of(semantics.place.result), _known(indices)
    if real is not None:
        fewer = torch.Size(shape).numel() <= torch.Size(x.shape).numel()
        if isinstance(x, Weight) and fewer:
            return x.moved(
                lambda t: aten.index(t, [r if r is None else r.to(t.device) for r in real]),
                semantics.offsets,
            )
        ids = semantics.activation(x)
        for dim in range(ids.dim()):
            if ids.stride(dim) == 0 and (dim >= len(real) or real[dim] is None):
                ids = ids.narrow(dim, 0, 1)
        return compress(aten.index(ids, real)).expand(shape)
    if any(i is not None and i.dtype == torch.bool for i in indices):
        raise ValueError("a mask that depends on data")
    if isinstance(x, Weight) and len(indices) == 1 and indices[0] is not None:
        rows = semantics.gathered(x, indices[0].shape, _node(semantics, lambda args: args[1][0]))
        if rows is not None:
            return rows
    chosen = [dim for dim, i in enumerate(indices) if i is not None]
    ids = semantics.reduce(x, chosen, keepdim=True)
    zeros = [None if i is None else torch.zeros([1] * i.dim(), dtype=torch.long) for i in indices]
    result: Value = aten.index(ids, zeros).expand(shape)
    return result


@rule("aten.index_select", **PICKED)
def index_select(semantics: Semantics, x: Value, dim: int, index: Tensor) -> Value:
    """Slices along one dimension."""
    real = value_of(index)
    if real is not None:
        return semantics.moved(
            lambda ids: along(lambda t: t.index_select(dim, real.to(t.device)), ids, [dim]), x
        )
    if isinstance(x, Weight) and dim % len(x.shape) == 0:
        rows = semantics.gathered(x, index.shape, _node(semantics, lambda args: args[2]))
        if rows is not None:
            return rows
    return semantics.reduce(x, [dim], keepdim=True).expand(shape_of(semantics.place.result))


@rule("aten.gather", **PICKED)
def gather_elements(
    semantics: Semantics, x: Value, dim: int, index: Tensor, **kwargs: Any
) -> Value:
    """One element along a dimension for every position."""
    ids, real = semantics.activation(x), value_of(index)
    if real is not None:
        return compress(aten.gather(ids, dim, real))
    ids = semantics.reduce(ids, [dim], keepdim=True)
    for other in range(ids.dim()):
        if other != dim % ids.dim():
            ids = ids.narrow(other, 0, index.shape[other])
    return ids.expand(index.shape)


@rule("aten.embedding", **PICKED)
def embedding(
    semantics: Semantics, weight: Value, index: Value, *args: Any, **kwargs: Any
) -> Value:
    """Rows selected by data."""
    real, rows = value_of(index), None
    if isinstance(weight, Weight) and real is None:
        rows = semantics.gathered(weight, index.shape, _node(semantics, lambda args: args[1]))
    elif isinstance(weight, Weight) and real is not None and len(real.unique()) == weight.shape[0]:
        # (if the example selects every row, positions are constant and exact)
        rows = weight.moved(lambda t: aten.index(t, [real.to(t.device)]), semantics.offsets)
    return rows or _rows(semantics, weight).expand(*index.shape, weight.shape[-1])


def _rows(semantics: Semantics, table: Value) -> Tensor:
    if not isinstance(table, Weight):
        return semantics.reduce(table, [0])
    return edges(semantics, table, constant((1, 1)), [0])


@rule("aten.embedding_bag", kind="bag")
def embedding_bag(semantics: Semantics, weight: Value, *args: Any, **kwargs: Any) -> Any:
    """Rows, perhaps weighted."""
    out = _rows(semantics, weight).expand(shape_of(semantics.place.result[0]))
    factors = arguments_of(semantics, weight, *args, **kwargs).get("per_sample_weights")
    if factors is not None:
        one = semantics.reduce(semantics.activation(factors), range(len(factors.shape)))
        out = semantics.product((1, out), (1, one))
    return with_others(semantics, out)


# --- writing


def _added(semantics: Semantics, target: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """Elements added to those with known numbers: at one place all share a scale."""
    index, order = places.reshape(-1).sort(stable=True)
    met, counts = torch.unique_consecutive(index, return_counts=True)
    rank = torch.arange(len(index)) - (torch.cumsum(counts, 0) - counts).repeat_interleave(counts)
    table = torch.full((len(met), int(counts.max())), NEUTRAL)
    table[torch.arange(len(met)).repeat_interleave(counts), rank] = source.expand(
        places.shape
    ).reshape(-1)[order]
    out = target.reshape(-1).clone()
    out[met] = semantics.join(semantics.reduce(compress(table), [1]), out[met])
    return compress(out.reshape(target.shape))


def _numbers(target: Tensor) -> Tensor:
    return torch.arange(target.numel()).reshape(target.shape)


@rule("aten.scatter_reduce", "aten.scatter", kind="write")
@rule("aten.scatter_add", **WRITTEN)
def scatter(
    semantics: Semantics, x: Value, dim: int, index: Tensor, source: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """Elements written, or added, to positions along one dimension."""
    how = kwargs.get("reduce", args[0] if args else None)
    if how in ("prod", "multiply"):
        raise ValueError("scattered products")
    target, real = semantics.activation(x), value_of(index)
    if index.numel() == 0:
        return target
    written = semantics.activation(source)
    plain = "add" not in semantics.place.op and how is None
    if real is not None and plain:
        grown = written.expand(index.shape) if not written.dim() else written
        return compress(aten.scatter(target.contiguous(), dim, real, grown))
    dim %= max(target.dim(), 1)
    if written.dim():
        for other, size in enumerate(index.shape):
            written = written.narrow(other, 0, size)
        if real is not None:
            places = _numbers(target).gather(dim, real)
            if kwargs.get("include_self", True) is False:
                target = target.scatter(dim, real, NEUTRAL)
            return _added(semantics, target, written, places)
        written = semantics.reduce(written, [dim], keepdim=True)
    sizes = zip(index.shape, target.shape, strict=False)
    if any(own != all_ for other, (own, all_) in enumerate(sizes) if other != dim):
        raise ValueError("positions in a part of a tensor")
    return semantics.join(target, written.expand(target.shape))


@rule("aten.index_add", kind="write", degree=(1,), linear="jointly")
@rule("aten.index_copy", **WRITTEN)
def index_add(
    semantics: Semantics,
    x: Value,
    dim: int,
    index: Tensor,
    source: Value,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Slices added, or written, to positions along one dimension."""
    target, written, real = semantics.activation(x), semantics.activation(source), value_of(index)
    if real is not None and real.numel() and target.dim():
        places = _numbers(target).index_select(dim, real.reshape(-1))
        if "copy" not in semantics.place.op:
            return _added(semantics, target, written, places)
        if len(real.unique()) == real.numel():
            return compress(aten.index_copy(target.contiguous(), dim, real, written))
    return semantics.join(target, semantics.reduce(written, [dim], keepdim=True))


@rule("aten.index_put", "aten._unsafe_index_put", **WRITTEN)
def index_put(
    semantics: Semantics, x: Value, indices: Indices, values: Value, accumulate: bool = False
) -> Tensor:
    """``x[i, j] = values``, or ``+=``."""
    target, written, real = semantics.activation(x), semantics.activation(values), _known(indices)
    if real is not None and not accumulate:
        return compress(aten.index_put(target.contiguous(), real, written))
    if real is not None:
        places = _numbers(target)[tuple(slice(None) if r is None else r for r in real)]
        return _added(semantics, target, written, places)
    leading = [i for i in indices if i is not None]
    if any(i is None for i in indices[: len(leading)]):
        raise ValueError("positions that do not come first")
    if any(i.dtype == torch.bool for i in leading) and not (
        len(leading) == 1 and written.dim() == 0
    ):
        raise ValueError("a mask that depends on data")
    rank = len(broadcast_shape(*(i.shape for i in leading)))
    rest = target.shape[leading[0].dim() if leading[0].dtype == torch.bool else len(leading) :]
    wide = written.expand(*[1] * max(0, rank + len(rest) - written.dim()), *written.shape)
    return semantics.join(
        target, semantics.reduce(wide, range(rank)).expand(rest) if written.dim() else written
    )


@rule("aten.masked_scatter", **WRITTEN)
def masked_scatter(semantics: Semantics, x: Value, mask: Value, source: Value) -> Tensor:
    """Elements of a tensor, in order, where a mask holds."""
    real = value_of(mask)
    if real is not None:
        target, written = semantics.activation(x), semantics.activation(source)
        return compress(aten.masked_scatter(target.contiguous(), real, written.contiguous()))
    return semantics.join(
        semantics.activation(x), semantics.reduce(source, range(len(source.shape)))
    )


state("aten.masked_select", **PICKED)
