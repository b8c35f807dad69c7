"""From uses of weights to weight blocks: tail and head ids in the layout of the parameter.

A use refers to a *view* of a parameter (transposed, sliced, split into groups, ...). If the view
consists of whole dimensions of the parameter, its ids are permuted back without one entry per
scalar; for other views they are scattered. All uses of one scalar must have the same scale factor,
``phi(head) - phi(tail)``; a transposed use exchanges tail and head, with opposite signs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from .records import Use
from .relations import Relations
from .scales import Scales
from .semantics import Place
from .union_find import negated
from .values import NEUTRAL, broadcast_shape, compress, distinct, has_zeros

Region = tuple[slice, ...]
Piece = tuple[Region, Tensor, Tensor]


def layout(
    view: Tensor, ids: Iterable[Tensor], shape: tuple[int, ...]
) -> tuple[Region, list[Tensor]] | None:
    """Ids on a strided view, rearranged to the parameter's own dimensions.

    Returns the region that the view covers, and each tensor of ids (sizes 1, or those of the
    region); ``None`` if the view does not consist of the parameter's dimensions.
    """
    strides, sizes = [prod(shape[dim + 1 :]) for dim in range(len(shape))], view.shape
    # for each dimension of the parameter, those of the view along it, the outermost first
    homes: list[list[int]] = [[] for _ in shape]
    for dim in sorted(range(view.dim()), key=lambda dim: -view.stride()[dim]):
        stride = view.stride(dim)
        found = [d for d, own in enumerate(strides) if own <= stride < own * shape[d]]
        if sizes[dim] > 1:
            if not found or stride % strides[found[0]]:
                return None
            homes[found[0]].append(dim)
    region = []
    for home, stride, size in zip(homes, strides, shape, strict=True):
        steps = [view.stride(dim) // stride for dim in home] or [1]
        if any(view.stride(a) != view.stride(b) * sizes[b] for a, b in pairwise(home)):
            return None
        start = view.storage_offset() // stride % size
        last = start + steps[-1] * (prod(sizes[dim] for dim in home) - 1)
        if last >= size:
            return None
        region.append(slice(start, last + 1, steps[-1]))

    used = [dim for home in homes for dim in home]
    order = used + [dim for dim in range(view.dim()) if dim not in used]

    def laid_out(own: Tensor) -> Tensor:
        for home in homes:
            if any(own.shape[dim] > 1 for dim in home):
                own = own.expand([n if d in home else own.shape[d] for d, n in enumerate(sizes)])
        return own.permute(order).reshape([prod(own.shape[dim] for dim in home) for home in homes])

    return tuple(region), [laid_out(own) for own in ids]


def _pattern(ids: Tensor) -> set[int]:
    return {dim for dim, size in enumerate(distinct(ids).shape) if size > 1}


def whole_region(shape: Sequence[int]) -> Region:
    """The region of a parameter that has all of its scalars."""
    return tuple(slice(0, size, 1) for size in shape)


def combine(
    pieces: list[Piece], shape: tuple[int, ...], equations: Relations
) -> tuple[Tensor, Tensor]:
    """Unify the uses of a parameter to one (tail, head); unused scalars have ``NEUTRAL``."""
    reference = _pattern(pieces[0][2])
    turned: list[Piece] = []
    for region, tail, head in pieces:
        pattern = _pattern(head)
        if not pattern & reference and (pattern | reference):
            tail, head = negated(head), negated(tail)
        turned.append((region, tail, head))
    every = whole_region(shape)
    if len(turned) == 1 and turned[0][0] == every:
        return turned[0][1], turned[0][2]
    tables = []
    for side in (0, 1):
        met = [(cuts, ends[side]) for cuts, *ends in turned]
        sizes = [
            size if any(ids.shape[dim] > 1 or cuts[dim] != every[dim] for cuts, ids in met) else 1
            for dim, size in enumerate(shape)
        ]
        tables.append(torch.full(sizes, NEUTRAL))
    for region, *both in turned:
        parts = []
        for table, new in zip(tables, both, strict=True):
            cuts = tuple(
                cut if n > 1 else slice(None) for cut, n in zip(region, table.shape, strict=True)
            )
            parts.append((table[cuts], new))
        fills = any(bool(((part == NEUTRAL) & (ids != NEUTRAL)).any()) for part, ids in parts)
        _same_factor(parts[0], parts[1], fills, equations)
        for part, ids in parts:
            part.copy_(torch.where(part == NEUTRAL, ids, part))
    return tables[0], tables[1]


def _same_factor(
    tail: tuple[Tensor, Tensor], head: tuple[Tensor, Tensor], fills: bool, equations: Relations
) -> None:
    """Both ends change by one number from one use to a later one, and by none if scalars without
    an earlier use are among them.
    """
    if not bool((head[0] != NEUTRAL).any()):
        return
    if fills:
        equations.unify(*tail)
        equations.unify(*head)
        return
    for side, other in ((tail, head), (head, tail)):
        if torch.equal(*side) and not has_zeros(side[0]):
            # one end does not change, so the other must not change either
            equations.unify(*other)
            return
    # the change varies along the dimensions along which both ends do
    shapes = zip(*(broadcast_shape(one.shape, two.shape) for one, two in (tail, head)), strict=True)
    change = equations.fresh([max(shape) if min(shape) > 1 else 1 for shape in shapes])
    for earlier, later in (tail, head):
        equations.relate((1, later), (-1, earlier), (-1, change))


def _pieces(use: Use, scales: Scales) -> Iterable[tuple[str, Piece]]:
    """A use in the layout of its parameter; of a view without whole dimensions, a full-size piece
    for each parameter.
    """
    name = use.weight.name
    if name is not None:
        found = layout(use.weight.index, (use.tail, use.head), scales.shapes[name])
        if found is not None:
            yield name, (found[0], found[1][0], found[1][1])
            return
    for name, inside, local in scales.parts(use.weight):
        shape, tables = scales.shapes[name], []
        for ids in (use.tail, use.head):
            met, table = ids.expand(inside.shape)[inside], torch.full((prod(shape),), NEUTRAL)
            table[local] = met
            # a scalar can occur several times: the table has its last ids, and all
            # others are unified with them
            scales.equations.unify(table[local], met)
            tables.append(table.reshape(shape))
        yield name, (whole_region(shape), tables[0], tables[1])


@dataclass(frozen=True)
class Ends:
    """Unsolved ids of a parameter; ``beyond`` masks scalars that only other input sizes use."""

    tail: Tensor
    head: Tensor
    beyond: Tensor | None = None

    def here(self) -> tuple[Tensor, Tensor]:
        """Tail and head at the traced sizes."""
        if self.beyond is None:
            return self.tail, self.head
        return torch.where(self.beyond, NEUTRAL, self.tail), self.head


def _beyond(tail: Tensor, traced: list[Piece], shape: tuple[int, ...]) -> Tensor | None:
    """Mask of the used scalars that no piece of the traced capture uses, or ``None``."""
    covered = torch.full([1] * len(shape), False)
    for region, own, _ in traced:
        if region == whole_region(shape) and bool((own != NEUTRAL).all()):
            return None
        table = torch.full(shape, False)
        table[region] = own != NEUTRAL
        covered = covered | table
    found = (tail != NEUTRAL) & ~covered
    return shrink(found) if bool(found.any()) else None


def assemble(scales: Scales, traced: int | None = None) -> dict[str, Ends]:
    """Raw ids of every used parameter; the first ``traced`` uses are at the traced sizes."""
    pieces: dict[str, list[Piece]] = {}
    own: dict[str, list[Piece]] = {}
    alive = scales.flows.alive(scales.equations.size)
    for number, (use, living) in enumerate(zip(scales.flows.uses, alive, strict=True)):
        if not (use.weight.shape.numel() and bool(living.any())):
            continue
        if not bool(living.all()):
            # (edges that are on no path fix nothing)
            ends = (torch.where(living, ids, NEUTRAL) for ids in (use.tail, use.head))
            use = Use(use.weight, *ends)
        for name, piece in _pieces(use, scales):
            pieces.setdefault(name, []).append(piece)
            if traced is None or number < traced:
                own.setdefault(name, []).append(piece)
    result = {}
    for name, uses in pieces.items():
        # equations between several uses of a weight are recorded with the weight as their place
        scales.place = Place(f"uses of {name}")
        tail, head = combine(uses, scales.shapes[name], scales.equations)
        here = own.get(name, [])
        beyond = None if len(here) == len(uses) else _beyond(tail, here, scales.shapes[name])
        result[name] = Ends(tail, head, beyond)
    return result


def extended(ids: Tensor) -> Tensor:
    """Extend ids to unused scalars along dimensions in which the others agree; else 0."""
    for dim in range(ids.dim()):
        void = ids == NEUTRAL
        low = ids.amin(dim, keepdim=True)
        if bool((void | (ids == low)).all()):
            ids = low
    return torch.where(ids == NEUTRAL, 0, ids)


def shrink(ids: Tensor) -> Tensor:
    """The ids with size 1 along every dimension in which they are constant."""
    return distinct(compress(ids)) if ids.dim() else ids.clone()
