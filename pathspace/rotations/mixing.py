"""Which matrices may mix features: the fourth reading of the rules.

An operation that is linear in features and treats all of them alike keeps their space whole. One
that multiplies them by different numbers splits it, a length makes its matrix orthogonal, and one
that acts on each feature alone fixes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..inference.registry import facts_of
from ..inference.sides import varying
from ..inference.values import (
    NEUTRAL,
    ROOT,
    Value,
    Weight,
    broadcast_shape,
    compress,
    constant,
    distinct,
    has_zeros,
)
from .coordinates import is_coordinate
from .layouts import equal_factors, narrowed, numbered, ranks_of
from .reading import Reading

ALONE = "each of its features has a factor of its own"


class Spaces(Reading):
    """The interpretation whose ids are coordinates of feature spaces."""

    # -- sums

    def join(self, *values: Value) -> Tensor:
        """A sum: its operands have one basis."""
        every = [self.activation(value) for value in values]
        shape = broadcast_shape(*(ids.shape for ids in every))
        spaces = [ids for ids in every if self.has_space(ids)]
        if not spaces:
            blank = all(bool((distinct(ids) == NEUTRAL).all()) for ids in every)
            return constant(shape, NEUTRAL if blank else ROOT)
        if any(self.is_product(ids) for ids in spaces):
            for ids in spaces:
                self.hold(ids, "squares are added to something else")
            return constant(shape)
        result = spaces[0].expand(shape)
        for ids in every:
            if ids is spaces[0]:
                continue
            wide = ids.expand(shape)
            if self.has_space(ids):
                self._equal(result, wide)
                # (of equal coordinates those that are the same at more places)
                one, other = sorted((result, wide), key=lambda ids: len(varying(ids)))
                result = compress(torch.where(one == NEUTRAL, other, one)).expand(shape)
            elif bool((distinct(ids) == ROOT).any()):
                self._added(spaces[0], ids)
                result = _filled(result)
        return result

    def _equal(self, left: Tensor, right: Tensor) -> None:
        small = [distinct(ids) for ids in (left, right)]
        lone = [bool((ids == ROOT).any()) for ids in small]
        if any(lone):
            for ids in (left, right):
                self.hold(ids, "constants are added to features")
            return
        zero = (left == NEUTRAL) + 2 * (right == NEUTRAL)
        if bool(distinct(zero).any()):
            # (a sum with zeros at some features is another multiple of them)
            for ids in (left, right):
                self.demands.mark(ids, narrowed(zero, varying(ids)))
        self.demands.unify(left, right)

    def _added(self, ids: Tensor, other: Tensor) -> None:
        """A number added to all features alike keeps the vector of ones; other numbers fix them."""
        shift = ids.dim() - other.dim()
        own = {dim for dim in varying(ids) if dim >= shift and other.shape[dim - shift] > 1}
        if own or self.is_product(ids):
            self.hold(ids, "constants are added to features")
        else:
            self.demands.mark(ids)
            self.demands.ones.append(self.demands.members(ids))

    def scaled(self, value: Tensor, by: Value) -> Tensor:
        """Features multiplied by constants: those with equal factors may still be mixed."""
        if not isinstance(by, Tensor) or not self.has_space(value):
            return value
        shift = value.dim() - by.dim()
        along = varying(value)
        wide = [dim for dim in along if dim >= shift and by.shape[dim - shift] > 1]
        if wide:
            self.demands.mark(value, equal_factors(value, by, along, wide))
        return value

    def product(self, *factors: tuple[int, Tensor]) -> Tensor:
        """A product of two features, whose sum may be a dot product."""
        shape = broadcast_shape(*(ids.shape for _, ids in factors))
        spaces = [(power, ids) for power, ids in factors if self.has_space(ids)]
        # (a factor without features, or one that is a product, is not followed here)
        plain = len(spaces) == len(factors) and not any(self.is_product(ids) for _, ids in spaces)
        powers = [power for power, _ in spaces]
        if plain and powers in ([2], [1, 1]):
            return self.demands.pairs(spaces[0][1], spaces[-1][1])
        for _, ids in spaces:
            self.hold(ids, "features are multiplied with each other")
        return constant(shape)

    def reduce(self, value: Value, dims: Iterable[int], keepdim: bool = False) -> Tensor:
        """Sums over other dimensions keep features; sums of features are dot products or means."""
        ids = self.activation(value)
        wanted = sorted({dim % ids.dim() for dim in dims}, reverse=True) if ids.dim() else []
        along = varying(ids) & set(wanted)
        facts = facts_of(self.place.op)
        if self.has_space(ids) and (along or not (facts.linear or facts.kind == "attention")):
            self._summed(ids, along)
            ids = constant(ids.shape)
        elif along:
            blank = bool((distinct(ids) == NEUTRAL).all())
            ids = constant(ids.shape, NEUTRAL if blank else ROOT)
        for dim in wanted:
            ids = (
                ids.narrow(dim, 0, 1)
                if ids.shape[dim]
                else constant([1 if d == dim else n for d, n in enumerate(ids.shape)], NEUTRAL)
            )
            ids = ids if keepdim else ids.select(dim, 0)
        return ids

    def _summed(self, ids: Tensor, along: set[int]) -> None:
        facts = facts_of(self.place.op)
        rest = varying(ids) - along
        labels = numbered(distinct(ids).shape, sorted(rest))
        if self.is_product(ids):
            if bool((is_coordinate(distinct(ids))).any()):
                self.hold(ids, "squares are added to something else")
                return
            left, right = self.demands.factors(distinct(ids))
            lone = (left == ROOT) ^ (right == ROOT)
            if bool(lone.any()):
                self.hold(ids, "features are multiplied with each other")
                return
            for side in (left, right):
                self.demands.mark(side, labels)
            self.demands.unify(left, right, dual=True)
        elif facts.kind in ("total", "mean") and not bool((distinct(ids) == ROOT).any()):
            self.demands.mark(ids, labels)
            self.demands.ones.append(self.demands.members(ids))
        elif facts.kind == "norm" and not bool((distinct(ids) == ROOT).any()):
            self._normed(ids, labels, mean=not facts.rotations)
        else:
            self.hold(ids, "its features are summed up or compared")

    def _normed(self, ids: Tensor, labels: Tensor, mean: bool) -> None:
        self.demands.mark(ids, labels)
        self.demands.unify(ids, ids, dual=True)
        if mean:
            self.demands.ones.append(self.demands.members(ids))

    def cut(self, value: Value, dims: Sequence[int], exact: bool = False) -> Tensor:
        """A normalisation keeps the length, and that by mean and deviation also the mean."""
        ids = self.activation(value)
        wanted = {dim % ids.dim() for dim in dims}
        along, small = varying(ids), distinct(ids)
        if not self.has_space(ids):
            return constant(ids.shape)
        if not along & wanted or self.is_product(ids) or bool((small == ROOT).any()):
            self.hold(ids, "each of its features is normalised alone")
            return constant(ids.shape)
        labels = numbered(small.shape, sorted(along - wanted))
        mean = not facts_of(self.place.op).rotations
        self._normed(ids, labels, mean)
        return _filled(ids) if mean else ids

    # -- weights

    def contract(self, weight: Weight, value: Value, dims: Sequence[int]) -> Tensor:
        """Read features along the summed dimensions, and write others along a remaining one."""
        ids = self.activation(value)
        full = broadcast_shape(weight.shape, ids.shape)
        rank = len(full)
        summed = {dim % rank for dim in dims}
        # dimensions along which the value may vary, whether its features do or not
        wide = {d + rank - ids.dim() for d, size in enumerate(ids.shape) if size > 1} - summed
        ids = ids.expand(full)
        if not summed and self.has_space(ids) and not self.is_product(ids):
            return self._gained(weight, ids, full)
        out_shape = [size for dim, size in enumerate(full) if dim not in summed]
        reads, writes = self._dimensions(weight, full, summed)
        own = varying(writes[-1]) if writes else set()
        beside = varying(ids) - summed
        if self.is_product(ids) or wide & own or beside & set().union(*map(varying, writes)):
            # (a matrix for each feature)
            self.hold(ids, ALONE)
            self.fix_weights([weight], ALONE)
            return constant(out_shape)
        if not bool((distinct(ids) == NEUTRAL).all()):
            self._meet(reads, ids, summed)
        if self.has_space(ids) and not varying(ids) & summed:
            # the features (perhaps a single one) are beside the sum, which mixes positions
            for view in writes:
                self.hold(view, "it mixes positions")
            return self._out(ids, summed)
        for view in writes[:-1]:
            self.hold(view, "it numbers matrices")
        return self._out(writes[-1], summed) if writes else constant(out_shape)

    def _dimensions(
        self, weight: Weight, full: Sequence[int], summed: set[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Coordinates along the dimensions of a weight that are summed, and along the others."""
        if weight.shift:
            self.fix_weights([weight], "a constant is added to a parameter")
        reads, writes = [], []
        for sides, small in self.places(weight):
            view = small.expand(full)
            self.used.append(self.demands.members(view))
            if not varying(view):
                self.hold(view, "its positions are told apart")
            elif varying(view) & summed:
                reads.append(view)
                self.reads.update(sides)
            else:
                writes.append(view)
        return reads, writes

    def _meet(self, reads: Sequence[Tensor], ids: Tensor, summed: set[int]) -> None:
        """Let one dimension of a weight read features; others read what does not change."""
        along = varying(ids) & summed
        meeting = [view for view in reads if varying(view) & along]
        whole = len(meeting) == 1 and along <= varying(meeting[0]) and self.has_space(ids)
        for view in reads:
            if not whole or view is not meeting[0]:
                self.hold(view, "it reads what does not change")
        if whole:
            self._read(meeting[0], ids, summed)
        elif along:
            self.hold(ids, "its features are read in several dimensions")

    def _read(self, view: Tensor, ids: Tensor, summed: set[int]) -> None:
        small, rest = distinct(ids), sorted(varying(ids) - summed)
        ranks = ranks_of(ids, varying(ids) & summed)
        if bool((small == ROOT).any()) or (rest and bool((ranks > 0).any())):
            for part in (view, ids):
                self.hold(part, "it reads features together with what does not change")
            return
        self.demands.mark(ids, numbered(small.shape, rest))
        self.demands.mark(view, ranks if not rest else None)
        self.demands.unify(ids, view, dual=True)

    def _gained(self, weight: Weight, ids: Tensor, full: Sequence[int]) -> Tensor:
        """Features, each times a parameter: coordinates of another basis."""
        along = varying(ids)
        places = weight.positions(self.offsets).expand(full)
        own, name = varying(places), weight.name
        if own < along:
            # one factor for many features
            self.fix_weights([weight], "it is one factor for many features")
            self.demands.mark(ids, numbered(distinct(ids).shape, sorted(own)))
            return ids
        twice = name is not None and self.shifts.setdefault(name, weight.shift) != weight.shift
        plain = bool(is_coordinate(distinct(ids)).all())
        if name is None or own != along or twice or not plain or weight.kept is not None:
            self.hold(ids, ALONE)
            self.fix_weights([weight], ALONE)
            return constant(full)
        small = [narrowed(tensor, along).reshape(-1) for tensor in (ids, places)]
        rows, inverse = torch.unique(torch.stack(small), dim=1, return_inverse=True)
        new = self.demands.gained(rows[0].numpy(), rows[1].numpy())
        shape = [n if dim in along else 1 for dim, n in enumerate(full)]
        return new[inverse].reshape(shape).expand(full)

    def _out(self, ids: Tensor, summed: set[int]) -> Tensor:
        for dim in sorted(summed, reverse=True):
            ids = ids.select(dim, 0)
        return ids


def _filled(ids: Tensor) -> Tensor:
    """Zeros are numbers after something was added."""
    return torch.where(ids == NEUTRAL, ROOT, ids) if has_zeros(ids) else ids
