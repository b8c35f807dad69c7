"""Which positions belong to one channel: the third reading of the rules, whose ids are classes of positions.

A channel is what can be removed or moved as a whole: positions along dimensions of parameters, buffers and activations
that stand for each other. Elements that are combined elementwise belong to one channel whatever the function, so GELU
and batch norm keep channels apart although they fix or cut scales. A weight reads channels along one of its dimensions
and writes others along another. What a reduction or a product of matrices makes one becomes one channel: that is how
the features of a head come together.

Ids: ``ROOT`` and ``NEUTRAL`` for elements without a channel, :data:`FIXED` for positions that have to stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from pathspace.inference.semantics import Semantics
from pathspace.inference.union_find import UnionFind
from pathspace.inference.values import NEUTRAL, ROOT, Value, Weight, compress, constant, distinct

FIXED = 1
Side = tuple[str, int]


def varying(ids: Tensor) -> set[int]:
    """Dimensions along which ids may differ."""
    return {dim for dim, (size, stride) in enumerate(zip(ids.shape, ids.stride(), strict=True)) if size > 1 and stride}


def _blank(ids: Tensor, old: int, new: int) -> Tensor:
    """Write elements without a channel otherwise."""
    return torch.where(ids == old, new, ids)


class Channels(Semantics):
    """The interpretation whose ids are channels.

    Attributes:
        written: which dimension is written, where a weight writes several: a table of matrices, one for each head or
            expert, has the first along its tables and the last inside each of them.
        sides: (tensor, dimension) -> ids of its positions.
        reads: sides along which a weight reads channels.
        several: whether there is such a table.
    """

    written = 0

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(offsets, shapes)
        self.equations = UnionFind()
        self.equations.fresh((1,))
        self.sizes = dict(shapes)
        self.sides: dict[Side, Tensor] = {}
        self.reads: set[Side] = set()
        self.several = False
        self._mixed: list[tuple[Tensor, set[int], str]] = []
        # ids below this one belong to buffers; what is said of them, until all else is known
        self._of_buffers = 0
        self._wishes: list[tuple[Tensor, Tensor]] = []
        # tensors used as activations: one id for each element
        self._elements: dict[str, Tensor] = {}
        self._regrouped: list[tuple[Tensor, range]] = []

    # -- tensors of the model ----------------------------------------------------------------------------------

    def side(self, name: str, dim: int) -> Tensor:
        """Ids of the positions along one dimension of a parameter or buffer."""
        if (name, dim) not in self.sides:
            self.sides[name, dim] = self.equations.fresh((self.sizes[name][dim],))
        return self.sides[name, dim]

    def _long(self, name: str) -> list[int]:
        return [dim for dim, size in enumerate(self.sizes[name]) if size > 1]

    def _laid(self, name: str, dim: int) -> Tensor:
        """Ids of one side, in the shape of the tensor."""
        shape = self.sizes[name]
        return self.side(name, dim).reshape([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)

    def _places(self, weight: Weight) -> list[tuple[list[Side], Tensor]]:
        """For every dimension of the parameter(s): the sides, and the ids of its positions in the shape of the view."""
        if weight.name is not None:
            own = weight.name
            return [([(own, d)], weight.of_table(self._laid(own, d))) for d in self._long(own)]
        found: dict[int, tuple[list[Side], Tensor]] = {}
        for name in self.parameters_of(weight):
            local = weight.index - self.offsets[name]
            inside = (local >= 0) & (local < prod(self.sizes[name]))
            for dim in self._long(name):
                sides, ids = found.setdefault(dim, ([], torch.full(weight.index.shape, ROOT)))
                sides.append((name, dim))
                ids[inside] = self._laid(name, dim).reshape(-1)[local[inside]]
        return [(sides, compress(ids)) for sides, ids in found.values()]

    def attach(self, weight: Weight) -> Tensor:
        """A parameter as an activation."""
        if weight.name is not None:
            return weight.of_table(self._table(weight.name))
        out = torch.full(weight.index.shape, ROOT)
        for name in self.parameters_of(weight):
            local = weight.index - self.offsets[name]
            inside = (local >= 0) & (local < prod(self.sizes[name]))
            out[inside] = self._table(name).reshape(-1)[local[inside]]
        return compress(out)

    def _table(self, name: str) -> Tensor:
        """Ids of all elements: those of the one dimension that has several, or one id for each element."""
        long = self._long(name)
        if len(long) < 2:
            return self._laid(name, long[0]) if long else constant(self.sizes[name])
        if name not in self._elements:
            self._elements[name] = self.equations.fresh(self.sizes[name])
        return self._elements[name]

    def given(self, kind: str, name: str, shape: Sequence[int]) -> Tensor:
        """Inputs stay as they are; buffers are tensors of the model.

        They follow the channels that they are combined with, unless that would make several channels one: a table of
        angles that all heads share has no channels.
        """
        if kind != "buffer":
            return constant(shape, FIXED)
        self.sizes[name] = tuple(shape)
        ids = self._table(name)
        self._of_buffers = self.equations.size
        return ids

    def statistics_of(self, mean: str, var: str, channels: Tensor, eps: float, frozen: bool) -> None:
        """Running statistics belong to their channels."""
        ids = self._one(channels, range(1, channels.dim())).reshape(-1)
        for name in (mean, var):
            self.equations.unify(self.side(name, 0), _blank(ids, ROOT, NEUTRAL))

    # -- primitives --------------------------------------------------------------------------------------------

    def _unify(self, left: Tensor, right: Tensor) -> None:
        left, right = (_blank(distinct(ids), ROOT, NEUTRAL) for ids in (left, right))
        if self._buffered(left) or self._buffered(right):
            self._wishes.append((left, right))
        else:
            self.equations.unify(left, right)

    def _buffered(self, ids: Tensor) -> bool:
        return bool(((ids > FIXED) & (ids < self._of_buffers)).any())

    def _one(self, ids: Tensor, dims: Iterable[int]) -> Tensor:
        """Unify along dimensions and keep one entry of each."""
        wanted = {dim for dim in dims if ids.shape[dim] > 1}
        shape = [1 if dim in wanted else size for dim, size in enumerate(ids.shape)]
        along = sorted(wanted & varying(ids))
        small = distinct(ids)
        if along:
            first = _blank(small, ROOT, NEUTRAL).amin(along, keepdim=True)
            self._unify(small, first)
            small = _blank(first, NEUTRAL, ROOT)
        return small.expand(shape)

    def join(self, *values: Value) -> Tensor:
        """Unify elementwise; what has size 1 along a dimension asks for nothing there."""
        every = sorted((self.activation(value) for value in values), key=lambda ids: self._buffered(distinct(ids)))
        shape = torch.broadcast_shapes(*(ids.shape for ids in every))
        plain = [bool((distinct(ids) == FIXED).all()) for ids in every]
        result = constant(shape)
        for ids, whole in zip(every, plain, strict=True):
            if whole:
                continue
            wide, small = ids.expand(shape), distinct(result)
            if bool((small == ROOT).all()):
                result = wide
                continue
            self._unify(wide, result)
            empty = (small == ROOT) | (small == NEUTRAL)
            if bool(empty.any()):
                result = compress(torch.where(empty, distinct(wide), small)).expand(shape)
        for ids, whole in zip(every, plain, strict=True):
            long = {dim + len(shape) - ids.dim() for dim, size in enumerate(ids.shape) if size > 1}
            if whole and long & varying(result):
                self.fix(result)
        return result.expand(shape) if any(not whole for whole in plain) else constant(shape, FIXED)

    def reduce(self, value: Value, dims: Iterable[int], keepdim: bool = False) -> Tensor:
        """What is reduced to one element belongs to one channel."""
        ids = self.activation(value)
        wanted = sorted({dim % ids.dim() for dim in dims}, reverse=True)
        ids = self._one(ids, wanted)
        ids = ids.expand([1 if dim in wanted else size for dim, size in enumerate(ids.shape)])
        if not keepdim:
            for dim in wanted:
                ids = ids.select(dim, 0)
        return ids

    def contract(self, weight: Weight, value: Value, dims: Sequence[int]) -> Tensor:
        """Channels that are read along summed dimensions, and others that are written along those that remain."""
        ids = self.activation(value)
        full = torch.broadcast_shapes(weight.shape, ids.shape)
        rank, ids = len(full), ids.expand(full)
        summed = {dim % rank for dim in dims}
        places = [(sides, view.expand(full)) for sides, view in self._places(weight)]
        reads = [(sides, view) for sides, view in places if varying(view) & summed]
        writes = [(sides, view) for sides, view in places if varying(view) and not varying(view) & summed]
        own = set().union(*(varying(view) for _, view in places)) if places else set()
        beside = varying(ids) - summed - own
        if beside and not varying(ids) & summed:
            # (one id per element: of positions mixed beside channels nothing is said)
            self._stay(reads + writes)
            return self._out(ids, summed)
        ids = self._one(ids, beside).expand(full)
        along = (varying(ids) & own) - summed
        if along:
            # each position along these dimensions has a matrix of its own
            ids = self._one(ids, summed).expand(full)
            for sides, view in reads + writes:
                if varying(view) & along:
                    self._unify(view, ids)
                else:
                    self._stay([(sides, view)])
            return self._out(ids, summed)
        first = next((number for number, (_, view) in enumerate(reads) if varying(view) & varying(ids)), None)
        zeros = bool((distinct(ids) == NEUTRAL).all())
        for number, (sides, view) in enumerate(reads):
            if number == first and not varying(view) - summed:
                self._unify(self._one(ids, set(range(rank)) - varying(view)), view)
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
        ids = self._one(ids, summed)
        for dim in sorted(summed, reverse=True):
            ids = ids.select(dim, 0)
        return ids

    def fix(self, value: Tensor) -> None:
        """These positions have to stay."""
        self._unify(value, constant((), FIXED))

    def pin(self, values: Iterable[Value], reason: str) -> None:
        """What an operation may do anything with has to stay."""
        for value in values:
            for ids in [view for _, view in self._places(value)] if isinstance(value, Weight) else [value]:
                self.fix(ids)

    def opaque(self, values: Sequence[Value], reason: str, dims: Sequence[int] = ()) -> Tensor:
        """Elementwise functions keep channels apart, homogeneous or not."""
        ids = self.join(*values)
        self._mix(ids, dims, reason or "normalised exponentials")
        return ids

    def _mix(self, ids: Tensor, dims: Sequence[int], reason: str) -> None:
        along = {dim % ids.dim() for dim in dims} & varying(ids)
        if along:
            place = f" in {self.place.module}" if self.place.module else ""
            self._mixed.append((distinct(ids), along, f"{self.place.op}{place} mixes its channels ({reason})"))

    def cut(self, value: Value, dims: Sequence[int], exact: bool = False) -> Tensor:
        """Normalised elements keep their identity, and depend on all they are normalised with."""
        ids = self.activation(value)
        self._mix(ids, dims, "normalised together")
        return ids

    def product(self, *factors: tuple[int, Tensor]) -> Tensor:
        """Elementwise."""
        return self.join(*(ids for _, ids in factors))

    def root(self, value: Tensor, degree: int) -> Tensor:
        """Elementwise."""
        return value

    def observe(self, value: Tensor) -> Tensor:
        """Elementwise."""
        return value

    def loop(self, weight: Weight, value: Tensor) -> Tensor:
        """Elementwise."""
        return self.contract(weight, value, ())

    def steps(self, length: int) -> int:
        """Every step is like the first three."""
        return min(length, 3)

    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> Weight | None:
        """All rows of a table are one to data."""
        return None

    def regrouped(self, value: Value, runs: Sequence[range]) -> None:
        """What is left of a dimension must fill the dimensions that it became."""
        if isinstance(value, Tensor):
            self._regrouped += [(value, run) for run in runs if set(run) & varying(value)]

    # -- the result --------------------------------------------------------------------------------------------

    def solve(self) -> tuple[dict[Side, Tensor], Mapping[int, str]]:
        """Channels of the positions of every side.

        Returns:
            (tensor, dimension) -> number of the channel of every position, 0 where it has to stay; and the channels
            that can change places only, with the reason.
        """
        classes = self._settled()
        fixed = int(classes[FIXED])
        sides = {side: torch.where(classes[ids] == fixed, 0, classes[ids]) for side, ids in self.sides.items()}
        mixed: dict[int, str] = {}
        for ids, along, reason in self._mixed:
            small = compress(self._seen(ids, classes))
            if varying(small) & along:
                for channel in torch.unique(small).tolist():
                    mixed.setdefault(channel, reason)
        return sides, mixed

    def _settled(self) -> Tensor:
        """Solve, until everything that follows from a solution holds; the classes of all ids."""
        while True:
            classes = torch.from_numpy(self.equations.solve())
            if self._wishes:
                self._grant(*self._wishes.pop(0))
            elif not (self._of_elements(classes) or self._rectangular(classes) or self._whole(classes)):
                return classes

    def _grant(self, left: Tensor, right: Tensor) -> None:
        """Say of a buffer what was said of it, unless channels of weights would become one by that."""
        trial = self.equations.copy()
        trial.unify(left, right)
        before, after = (
            torch.from_numpy(np.abs(equations.solve()))[self._of_buffers :] for equations in (self.equations, trial)
        )
        if len(before.unique()) == len(after.unique()):
            self.equations = trial

    def _seen(self, ids: Tensor, classes: Tensor) -> Tensor:
        return classes[_blank(ids, NEUTRAL, ROOT)]

    def _whole(self, classes: Tensor) -> bool:
        """Where channels are normalised in several sets, each set is one channel; whether that changed anything."""
        changed = False
        for ids, along, _ in self._mixed:
            found = varying(compress(self._seen(ids, classes)))
            if found & along and found - along:
                self._one(ids, along)
                changed = True
        return changed

    def _of_elements(self, classes: Tensor) -> bool:
        """Let tensors used as activations have channels along one dimension; whether that changed anything."""
        changed = False
        for name in list(self._elements):
            ids = self._elements[name]
            along = varying(compress(classes[ids]))
            if len(along) > 1:
                self.fix(ids)
            changed = True
            del self._elements[name]
            for dim in self._long(name):
                if along == {dim}:
                    self._unify(self._laid(name, dim), ids)
                else:
                    self.fix(self.side(name, dim))
        return changed

    def _rectangular(self, classes: Tensor) -> bool:
        """Let channels vary along one of the dimensions that a dimension became: the last; whether that changed any."""
        changed = False
        for ids, run in self._regrouped:
            along = varying(compress(self._seen(distinct(ids), classes))) & set(run)
            if len(along) > 1:
                self._one(ids, [min(along)])
                changed = True
        return changed


class InnerChannels(Channels):
    """The same with channels inside the matrices of a table in place of its matrices."""

    written = -1


__all__ = ["FIXED", "Channels", "InnerChannels", "Side"]
