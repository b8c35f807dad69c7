"""Elements selected by position.

Constant positions (tables of relative positions, permutations) are treated exactly. Positions from
data are arbitrary, so all elements that they could select share one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import NEUTRAL, Value, Weight, along, compress, constant, shape_of, value_of
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
        real = value_of(index)
        if index is not None and real is None:
            return None
        masks = real is not None and real.dtype == torch.bool and real.dim()
        found += real.nonzero(as_tuple=True) if masks and real is not None else [real]
    return [None if real is None else real.contiguous() for real in found]


def _rows(semantics: Semantics, table: Value, index: Value) -> Weight | None:
    """Rows of a parameter that data selects; ``None`` if all of them must be treated as one."""
    if not isinstance(table, Weight) or value_of(index) is not None:
        return None
    node = semantics.place.node
    # (the index is the last operand)
    where = object() if node is None else node.all_input_nodes[-1]
    return semantics.gathered(table, index.shape, where)


@rule("aten.index", "aten._unsafe_index", **PICKED)
def index(semantics: Semantics, x: Value, indices: Indices) -> Value:
    """``x[i, :, j]``."""
    shape, real = semantics.place.shape, _known(indices)
    if real is not None:
        if isinstance(x, Weight) and torch.Size(shape).numel() <= x.shape.numel():
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
    if len(indices) == 1 and indices[0] is not None and (rows := _rows(semantics, x, indices[0])):
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
            lambda ids: along(lambda t: t.index_select(dim, real.to(t.device)), [dim], ids), x
        )
    rows = _rows(semantics, x, index) if dim in (0, -len(x.shape)) else None
    shape = semantics.place.shape
    return rows or semantics.reduce(x, [dim], keepdim=True).expand(shape)


@rule("aten.gather", **PICKED)
def gather_elements(
    semantics: Semantics, x: Value, dim: int, index: Tensor, **kwargs: Any
) -> Value:
    """One element along a dimension for every position."""
    ids, real = semantics.activation(x), value_of(index)
    if real is not None:
        return compress(aten.gather(ids, dim, real))
    ids = semantics.reduce(ids, [dim], keepdim=True)
    return ids[tuple(map(slice, index.shape))].expand(index.shape)


@rule("aten.embedding", **PICKED)
def embedding(
    semantics: Semantics, weight: Value, index: Value, *args: Any, **kwargs: Any
) -> Value:
    """Rows selected by data."""
    real, rows = value_of(index), _rows(semantics, weight, index)
    if isinstance(weight, Weight) and real is not None and len(real.unique()) == weight.shape[0]:
        # (if the example selects every row, positions are constant and exact)
        rows = weight.moved(lambda t: aten.index(t, [real.to(t.device)]), semantics.offsets)
    return rows or _any_row(semantics, weight).expand(*index.shape, weight.shape[-1])


def _any_row(semantics: Semantics, table: Value) -> Tensor:
    if not isinstance(table, Weight):
        return semantics.reduce(table, [0])
    return edges(semantics, table, constant((1, 1)), [0])


@rule("aten.embedding_bag", kind="bag")
def embedding_bag(semantics: Semantics, weight: Value, *args: Any, **kwargs: Any) -> Any:
    """Rows, perhaps weighted."""
    out = _any_row(semantics, weight).expand(shape_of(semantics.place.result[0]))
    factors = arguments_of(semantics, weight, *args, **kwargs).get("per_sample_weights")
    if factors is not None:
        one = semantics.reduce(factors, range(len(factors.shape)))
        out = semantics.product((1, out), (1, one))
    return with_others(semantics, out)


# --- writing


def _numbers(target: Tensor) -> Tensor:
    return torch.arange(target.numel()).reshape(target.shape)


def _put(
    semantics: Semantics, target: Tensor, source: Tensor, places: Tensor, adds: bool
) -> Tensor:
    """Elements written, or added, to those with known numbers ``places``; all that are added at
    one place share a scale.
    """
    if not places.numel():
        return target
    index, written = places.reshape(-1), source.expand(places.shape).reshape(-1)
    out = target.reshape(-1).clone()
    if adds:
        index, group, counts = index.unique(return_inverse=True, return_counts=True)
        group, order = group.sort(stable=True)
        rank = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group]
        table = torch.full((len(index), int(counts.max())), NEUTRAL)
        table[group, rank] = written[order]
        written = semantics.join(semantics.reduce(compress(table), [1]), out[index])
    out[index] = written
    return compress(out.reshape(target.shape))


@rule("aten.scatter_reduce", "aten.scatter", kind="write")
@rule("aten.scatter_add", **WRITTEN)
def scatter(
    semantics: Semantics, x: Value, dim: int, index: Tensor, source: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """Elements written, or added, to positions along one dimension."""
    how = kwargs.get("reduce", args[0] if args else None)
    if how in ("prod", "multiply"):
        raise ValueError("scattered products")
    target, written, real = semantics.activation(x), semantics.activation(source), value_of(index)
    if written.dim():
        written = written[tuple(map(slice, index.shape))]
    if real is not None:
        places = _numbers(target).gather(dim, real)
        if kwargs.get("include_self", True) is False:
            target = target.scatter(dim, real, NEUTRAL)
        adds = "add" in semantics.place.op or how is not None
        return _put(semantics, target, written, places, adds)
    wanted = [index.shape[d] if d == dim % target.dim() else n for d, n in enumerate(target.shape)]
    if index.shape != torch.Size(wanted):
        raise ValueError("positions in a part of a tensor")
    return semantics.join(target, semantics.reduce(written, [dim], keepdim=True))


@rule("aten.index_add", kind="write", degree=(1,), linear="jointly")
@rule("aten.index_copy", **WRITTEN)
def index_add(
    semantics: Semantics, x: Value, dim: int, index: Tensor, source: Value, **kwargs: Any
) -> Tensor:
    """Slices added, or written, to positions along one dimension."""
    target, written, real = semantics.activation(x), semantics.activation(source), value_of(index)
    if real is None or not target.dim():
        return semantics.join(target, semantics.reduce(written, [dim], keepdim=True))
    repeated = len(real.unique()) < real.numel()
    places = _numbers(target).index_select(dim, real.reshape(-1))
    return _put(semantics, target, written, places, repeated or "copy" not in semantics.place.op)


@rule("aten.index_put", "aten._unsafe_index_put", **WRITTEN)
def index_put(
    semantics: Semantics, x: Value, indices: Indices, values: Value, accumulate: bool = False
) -> Tensor:
    """``x[i, j] = values``, or ``+=``."""
    target, written, real = semantics.activation(x), semantics.activation(values), _known(indices)
    if real is not None:
        return _put(semantics, target, written, aten.index(_numbers(target), real), accumulate)
    leading = [i for i in indices if i is not None]
    if any(i is None for i in indices[: len(leading)]):
        raise ValueError("positions that do not come first")
    if any(i.dtype == torch.bool for i in leading) and (len(leading) > 1 or written.dim()):
        raise ValueError("a mask that depends on data")
    own = max(0, written.dim() - target.dim() + len(leading))
    return semantics.join(target, semantics.reduce(written, range(own)))


@rule("aten.masked_scatter", **WRITTEN)
def masked_scatter(semantics: Semantics, x: Value, mask: Value, source: Value) -> Tensor:
    """Elements of a tensor, in order, where a mask holds."""
    target, real = semantics.activation(x), value_of(mask)
    if real is None:
        return semantics.join(target, semantics.reduce(source, range(len(source.shape))))
    places = _numbers(target)[real.expand(target.shape)]
    written = semantics.activation(source).reshape(-1)[: len(places)]
    return _put(semantics, target, written, places, False)


state("aten.masked_select", **PICKED)
