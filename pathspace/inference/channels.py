"""Which positions belong to one channel: the third reading of the rules, whose ids
are classes of positions.

A channel is a set of corresponding positions along dimensions of parameters, buffers and
activations that can be removed or moved together. Elements that a function combines elementwise
belong to one channel, so GELU and batch norm keep channels separate although they fix or cut
scales. A weight reads channels along one of its dimensions and writes others along another. A
reduction or a matrix product merges all positions that it sums to one channel; this merges the
features of an attention head.

Ids: ``ROOT`` and ``NEUTRAL`` for elements without a channel, :data:`FIXED` for
positions that must not be moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from .registry import facts_of
from .sides import Side, Sided, varying
from .union_find import UnionFind
from .values import NEUTRAL, ROOT, Value, Weight, broadcast_shape, compress, constant, distinct

FIXED = 1


def _blank(ids: Tensor, old: int, new: int) -> Tensor:
    return torch.where(ids == old, new, ids)


class Channels(Sided):
    """The interpretation whose ids are channels.

    Attributes:
        written: which dimension counts as written if a weight writes several: in a table
            of matrices, one for each head or expert, the first is along the table and the
            last inside each matrix.
        certain: whether channels of one layout can change places; if not, it has to be measured.
        reads: sides along which a weight reads channels.
        several: whether a weight writes several dimensions.
        pinned: whether an operation has no rule for its operands, so that its result has no ids.
    """

    written = 0
    certain = True

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(offsets, shapes)
        self.equations = UnionFind()
        self.equations.fresh((1,))
        self.reads: set[Side] = set()
        self.several = self.pinned = False
        self._mixed: list[tuple[Tensor, set[int], str]] = []
        # ids below this one belong to buffers; their equations wait until all others are known
        self._of_buffers = 0
        self._wishes: list[tuple[Tensor, Tensor]] = []
        # tensors used as activations: one id for each element
        self._elements: dict[str, Tensor] = {}
        self._regrouped: list[tuple[Tensor, range]] = []

    # -- tensors of the model

    def fresh(self, count: int) -> Tensor:
        """New ids, all different."""
        return self.equations.fresh((count,))

    def attach(self, weight: Weight) -> Tensor:
        """A parameter as an activation."""
        return compress(self.laid_out(weight, self._table))

    def _table(self, name: str) -> Tensor:
        """Ids along the only dimension longer than 1, or one id for each element."""
        long = self.long(name)
        if len(long) < 2:
            return self.laid(name, long[0]) if long else constant(self.sizes[name])
        if name not in self._elements:
            self._elements[name] = self.equations.fresh(self.sizes[name])
        return self._elements[name]

    def given(self, kind: str, name: str, shape: Sequence[int]) -> Tensor:
        """Fixed positions of an input; channels of a buffer, unless it would merge several."""
        if kind != "buffer":
            return constant(shape, FIXED)
        self.sizes[name] = tuple(shape)
        ids = self._table(name)
        self._of_buffers = self.equations.size
        return ids

    def statistics_of(self, mean: str, var: str, channels: Tensor, eps: float) -> None:
        """Give running statistics the channels of their normalisation."""
        ids = self._one(channels, range(1, channels.dim())).reshape(-1)
        for name in (mean, var):
            self.equations.unify(self.side(name, 0), _blank(ids, ROOT, NEUTRAL))

    # -- primitives

    def _unify(self, left: Tensor, right: Tensor) -> None:
        left, right = (_blank(distinct(ids), ROOT, NEUTRAL) for ids in (left, right))
        if self._buffered(left) or self._buffered(right):
            self._wishes.append((left, right))
        else:
            self.equations.unify(left, right)

    def _buffered(self, ids: Tensor) -> bool:
        # (numpy is quicker on few numbers)
        numbers = ids.numpy()
        return bool(((numbers > FIXED) & (numbers < self._of_buffers)).any())

    def _one(self, ids: Tensor, dims: Iterable[int]) -> Tensor:
        wanted = {dim for dim in dims if ids.shape[dim] > 1}
        if not wanted:
            return ids
        shape = [1 if dim in wanted else size for dim, size in enumerate(ids.shape)]
        along = sorted(wanted & varying(ids))
        small = distinct(ids)
        if along:
            first = _blank(small, ROOT, NEUTRAL).amin(along, keepdim=True)
            self._unify(small, first)
            small = _blank(first, NEUTRAL, ROOT)
        return small.expand(shape)

    def join(self, *values: Value) -> Tensor:
        """Unify elementwise; an operand of size 1 along a dimension imposes nothing there."""
        every = sorted(
            (self.activation(value) for value in values),
            key=lambda ids: self._buffered(distinct(ids)),
        )
        shape = broadcast_shape(*(ids.shape for ids in every))
        fixed, moving = list[Tensor](), list[Tensor]()
        for ids in every:
            (fixed if bool((distinct(ids) == FIXED).all()) else moving).append(ids)
        if not moving:
            return constant(shape, FIXED)
        result = moving[0].expand(shape)
        for ids in moving[1:]:
            wide, small = ids.expand(shape), distinct(result)
            self._unify(wide, result)
            empty = (small == ROOT) | (small == NEUTRAL)
            if bool(empty.any()):
                result = compress(torch.where(empty, distinct(wide), small)).expand(shape)
        for ids in fixed:
            long = {dim + len(shape) - ids.dim() for dim, size in enumerate(ids.shape) if size > 1}
            if long & varying(result):
                self.fix(result)
        return result

    def merged(self, ids: Tensor, dims: Sequence[int]) -> Tensor:
        """Merge what is reduced; a sum of all channels does not change with their order."""
        if self._unordered(ids, set(dims)):
            self._mix(ids, dims, "summed")
            ids = constant(ids.shape)
        return self._one(ids, dims)

    def _unordered(self, ids: Tensor, summed: set[int]) -> bool:
        """Whether it is a plain sum or mean of all positions along which channels differ."""
        kind = facts_of(self.place.op).kind
        return kind in ("total", "mean") and bool(varying(ids)) and varying(ids) <= summed

    def contract(self, weight: Weight, value: Value, dims: Sequence[int]) -> Tensor:
        """Read channels along the summed dimensions, and write channels along a remaining one."""
        ids = self.activation(value)
        full = broadcast_shape(weight.shape, ids.shape)
        rank, ids = len(full), ids.expand(full)
        summed = {dim % rank for dim in dims}
        places = [(sides, view.expand(full)) for sides, view in self.places(weight)]
        reads = [(sides, view) for sides, view in places if varying(view) & summed]
        writes = [
            (sides, view) for sides, view in places if varying(view) and not varying(view) & summed
        ]
        own = set[int]().union(*(varying(view) for _, view in places))
        beside = varying(ids) - summed - own
        if beside and not varying(ids) & summed:
            # (one id per element: the weight mixes positions, not channels)
            self._stay(reads + writes)
            return self._out(ids, summed)
        ids = self._one(ids, beside).expand(full)
        along = (varying(ids) & own) - summed
        if along and self._unordered(ids, summed):
            ids, along = constant(full), set()
        if along:
            # each position along these dimensions has its own matrix
            ids = self._one(ids, summed).expand(full)
            for sides, view in reads + writes:
                if varying(view) & along:
                    self._unify(view, ids)
                else:
                    self._stay([(sides, view)])
            return self._out(ids, summed)
        first = next(
            (number for number, (_, view) in enumerate(reads) if varying(view) & varying(ids)), None
        )
        zeros = bool((distinct(ids) == NEUTRAL).all())
        for number, (sides, view) in enumerate(reads):
            if number == first and not varying(view) - summed:
                read = self._one(ids, set(range(rank)) - varying(view))
                # what reads an input or a constant stays, also where channels stand beside it
                self._unify(_blank(distinct(read), ROOT, FIXED).expand(read.shape), view)
                self.reads.update(sides)
            elif not zeros:
                self._stay([(sides, view)])
        if not writes:
            return self._out(constant(full), summed)
        self.several |= len(writes) > 1
        chosen = writes.pop(self.written)
        self._stay(writes)
        return self._out(chosen[1], summed)

    def _stay(self, places: Iterable[tuple[list[Side], Tensor]]) -> None:
        for _, view in places:
            self.fix(view)

    def _out(self, ids: Tensor, summed: set[int]) -> Tensor:
        return self.dropped(self._one(ids, summed), summed)

    def fix(self, value: Tensor) -> None:
        """Fix positions, which can then not be removed or moved."""
        self._unify(value, constant((), FIXED))

    def pin(self, values: Iterable[Value], reason: str) -> None:
        """Fix the channels of the operands of an operation without a rule."""
        self.pinned = True
        for value in values:
            if isinstance(value, Weight):
                self._stay(self.places(value))
            else:
                self.fix(value)

    def opaque(self, values: Sequence[Value], reason: str, dims: Sequence[int] = ()) -> Tensor:
        """Elementwise functions keep channels separate, homogeneous or not."""
        ids = self.join(*values)
        self._mix(ids, dims, reason or "normalised exponentials")
        return ids

    def _mix(self, ids: Tensor, dims: Sequence[int], reason: str) -> None:
        along = {dim % ids.dim() for dim in dims} & varying(ids)
        if along:
            place = f" in {self.place.module}" if self.place.module else ""
            self._mixed.append(
                (distinct(ids), along, f"{self.place.op}{place} mixes its channels ({reason})")
            )

    def cut(self, value: Value, dims: Sequence[int], exact: bool = False) -> Tensor:
        """Normalised elements keep their channels, but depend on each other."""
        ids = self.activation(value)
        self._mix(ids, dims, "normalised together")
        return ids

    def product(self, *factors: tuple[int | Fraction, Tensor]) -> Tensor:
        """Elementwise."""
        return self.join(*(ids for _, ids in factors))

    def observe(self, value: Tensor) -> Tensor:
        """Elementwise."""
        return value

    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> Weight | None:
        """Rows that data selects are not distinguished."""
        return None

    def regrouped(self, value: Value, runs: Sequence[range]) -> None:
        """The channels of a split dimension must remain rectangular."""
        if isinstance(value, Tensor):
            self._regrouped += [(value, run) for run in runs if set(run) & varying(value)]

    # -- the result

    def solve(self) -> tuple[dict[Side, Tensor], Mapping[int, str]]:
        """Side -> the channel of every position (0: fixed); channels not to be removed, and why."""
        classes = self._settled()
        fixed = int(classes[FIXED])
        sides = {
            side: torch.where(classes[ids] == fixed, 0, classes[ids])
            for side, ids in self.sides.items()
        }
        mixed: dict[int, str] = {}
        for ids, along, reason in self._mixed:
            small = compress(self._seen(ids, classes))
            if varying(small) & along:
                for channel in torch.unique(small).tolist():
                    mixed.setdefault(channel, reason)
        return sides, mixed

    def _settled(self) -> Tensor:
        """Add consequences of the solution until nothing changes; the classes of all ids."""
        while True:
            classes = torch.from_numpy(self.equations.solve())
            if self._wishes:
                self._grant(*self._wishes.pop(0))
            elif not (
                self._of_elements(classes) or self._rectangular(classes) or self._whole(classes)
            ):
                return classes

    def _grant(self, left: Tensor, right: Tensor) -> None:
        """Add an equation of a buffer, unless it would merge channels of weights."""
        trial = self.equations.copy()
        trial.unify(left, right)
        before, after = (
            torch.from_numpy(np.abs(equations.solve()))[self._of_buffers :]
            for equations in (self.equations, trial)
        )
        if len(before.unique()) == len(after.unique()):
            self.equations = trial

    def _seen(self, ids: Tensor, classes: Tensor) -> Tensor:
        return classes[_blank(ids, NEUTRAL, ROOT)]

    def _varying(self, ids: Tensor, classes: Tensor) -> set[int]:
        small = distinct(ids)
        blank, seen = (small == NEUTRAL) | (small == ROOT), self._seen(small, classes)
        if not bool(blank.any()):
            return varying(compress(seen))
        last = torch.iinfo(seen.dtype).max
        low, high = seen.masked_fill(blank, last), seen.masked_fill(blank, -last)
        return {dim for dim in range(seen.dim()) if bool((low.amin(dim) < high.amax(dim)).any())}

    def _whole(self, classes: Tensor) -> bool:
        """Make each set of channels that is normalised together one; whether any changed."""
        changed = False
        for ids, along, _ in self._mixed:
            found = self._varying(ids, classes)
            if found & along and found - along:
                self._one(ids, along)
                changed = True
        return changed

    def _of_elements(self, classes: Tensor) -> bool:
        """Give tensors used as activations channels along one dimension."""
        found, self._elements = self._elements, {}
        for name, ids in found.items():
            along = varying(compress(classes[ids]))
            if len(along) > 1:
                self.fix(ids)
            for dim in self.long(name):
                if along == {dim}:
                    self._unify(self.laid(name, dim), ids)
                else:
                    self.fix(self.side(name, dim))
        return bool(found)

    def _rectangular(self, classes: Tensor) -> bool:
        """Let channels vary only along the last part of a split dimension."""
        changed = False
        for ids, run in self._regrouped:
            along = self._varying(ids, classes) & set(run)
            if len(along) > 1:
                self._one(ids, [min(along)])
                changed = True
        return changed


class InnerChannels(Channels):
    """The interpretation in which the channels of a table of matrices are inside the matrices."""

    written = -1


class NestedChannels(InnerChannels):
    """Channels inside of heads and groups, whatever the order of what is reduced."""

    certain = False

    def _unordered(self, ids: Tensor, summed: set[int]) -> bool:
        return bool(varying(ids) & summed)

    def _whole(self, classes: Tensor) -> bool:
        return False

    def _rectangular(self, classes: Tensor) -> bool:
        return False
