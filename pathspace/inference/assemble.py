"""From uses of weights to weight blocks: tail and head ids in the layout of the parameter.

A use refers to a *view* of a parameter (transposed, sliced, split into groups, ...). If the view
consists of whole dimensions of the parameter, its ids are permuted back without one entry per
scalar; for other views they are scattered. All uses of one scalar must have the same scale factor,
``phi(head) - phi(tail)``; a transposed use exchanges tail and head, with opposite signs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .parameter_scales import Region, layout
from .records import Use
from .relations import Relations
from .scales import Scales
from .semantics import Place
from .union_find import negated
from .values import NEUTRAL, broadcast_shape, compress, distinct, has_zeros

Piece = tuple[Region, Tensor, Tensor]


def _pattern(ids: Tensor) -> set[int]:
    return {dim for dim, size in enumerate(distinct(ids).shape) if size > 1}


def _whole(region: Region, shape: tuple[int, ...]) -> bool:
    return all(part == slice(0, size, 1) for part, size in zip(region, shape, strict=True))


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
    if len(turned) == 1 and _whole(turned[0][0], shape):
        return turned[0][1], turned[0][2]
    wide = [[1] * len(shape), [1] * len(shape)]
    for region, tail, head in turned:
        for side, ids in enumerate((tail, head)):
            for dim in range(len(shape)):
                if shape[dim] > 1 and (
                    ids.shape[dim] > 1 or region[dim] != slice(0, shape[dim], 1)
                ):
                    wide[side][dim] = shape[dim]
    tables = [torch.full(wide[side], NEUTRAL) for side in (0, 1)]
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


def dense_pieces(use: Use, scales: Scales) -> Iterable[tuple[str, Piece]]:
    """A use of a view without whole dimensions: one full-size piece for each parameter."""
    positions = use.weight.positions(scales.offsets)
    tail, head = (ids.expand(positions.shape).flatten() for ids in (use.tail, use.head))
    positions = positions.flatten()
    for name in scales.parameters_of(use.weight):
        shape = scales.shapes[name]
        size = torch.Size(shape).numel()
        local = positions - scales.offsets[name]
        inside = (local >= 0) & (local < size)
        tables = []
        for ids in (tail, head):
            table = torch.full((size,), NEUTRAL)
            table[local[inside]] = ids[inside]
            # a scalar can occur several times: the table has its last ids, and all
            # others are unified with them
            scales.equations.unify(table[local[inside]], ids[inside])
            tables.append(table.reshape(shape))
        yield name, (tuple(slice(0, length, 1) for length in shape), tables[0], tables[1])


def _living(use: Use, alive: Tensor) -> Use | None:
    """The use without the edges that are on no path, which fix nothing."""
    if bool(alive.all()):
        return use
    if not bool(alive.any()):
        return None
    return Use(
        use.weight, torch.where(alive, use.tail, NEUTRAL), torch.where(alive, use.head, NEUTRAL)
    )


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
        if _whole(region, shape) and bool((own != NEUTRAL).all()):
            return None
        table = torch.full(shape, False)
        table[region] = own != NEUTRAL
        covered = covered | table
    found = (tail != NEUTRAL) & ~covered
    return shrink(found) if bool(found.any()) else None


def assemble(scales: Scales, traced: int | None = None) -> dict[str, Ends]:
    """Raw ids of every used parameter; the first ``traced`` uses are at the traced sizes."""
    own: dict[str, int] = {}
    pieces: dict[str, list[Piece]] = {}
    for number, (recorded, head_alive) in enumerate(
        zip(scales.flows.uses, scales.flows.alive(scales.equations.size), strict=True)
    ):
        if number == traced:
            own = {name: len(uses) for name, uses in pieces.items()}
        use = _living(recorded, head_alive) if recorded.weight.shape.numel() else None
        if use is None:
            continue
        name = use.weight.name
        found = (
            layout(use.weight.index, (use.tail, use.head), scales.shapes[name])
            if name is not None
            else None
        )
        if name is not None and found is not None:
            pieces.setdefault(name, []).append((found[0], found[1][0], found[1][1]))
        else:
            for other, piece in dense_pieces(use, scales):
                pieces.setdefault(other, []).append(piece)
    result = {}
    for name, uses in pieces.items():
        # equations between several uses of a weight are recorded with the weight as their place
        scales.place = Place(f"uses of {name}")
        tail, head = combine(uses, scales.shapes[name], scales.equations)
        count = (
            len(uses) if traced is None or traced == len(scales.flows.uses) else own.get(name, 0)
        )
        beyond = None if count == len(uses) else _beyond(tail, uses[:count], scales.shapes[name])
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
