"""Which matrices may mix features: the fourth reading of the rules, whose ids are coordinates.

An operation that is linear in features and treats all of them alike keeps their space whole. One
that multiplies them by different numbers splits it, a length makes its matrix orthogonal, and one
that acts on each feature alone fixes them. What has no rule here fixes all coordinates it meets,
which is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..inference.channels import varying
from ..inference.registry import facts_of
from ..inference.semantics import Place, Semantics
from ..inference.values import (
    NEUTRAL,
    ROOT,
    Value,
    Weight,
    broadcast_shape,
    compress,
    constant,
    distinct,
    shape_of,
)
from .coordinates import PAIRS, Demands, is_coordinate
from .followed import follows
from .layouts import equal_factors, narrowed, position, ranks_of
from .turns import pieces_of, turned

Side = tuple[str, int]
ALONE = "each of its features has a factor of its own"


class Spaces(Semantics):
    """The interpretation whose ids are coordinates of feature spaces.

    Attributes:
        demands: what operations demand of the coordinates.
        sides: (parameter, dimension) -> coordinates of its positions.
        shifts: parameter used as a gain -> the number added to it.
    """

    def __init__(
        self,
        offsets: dict[str, int],
        shapes: dict[str, tuple[int, ...]],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(offsets, shapes)
        self.demands = Demands()
        self.sides: dict[Side, Tensor] = {}
        self.shifts: dict[str, float] = {}
        self.reads: set[Side] = set()
        self._buffers = buffers or {}
        self._used: list[np.ndarray] = []
        # node -> its ids in the last run of its graph
        self._seen: dict[fx.Node, Any] = {}

    # -- tensors of the model

    def side(self, name: str, dim: int) -> Tensor:
        """Coordinates of the positions along one dimension of a parameter."""
        if (name, dim) not in self.sides:
            self.sides[name, dim] = self.demands.fresh((self.shapes[name][dim],))
        return self.sides[name, dim]

    def _laid(self, name: str, dim: int) -> Tensor:
        shape = self.shapes[name]
        wanted = [-1 if d == dim else 1 for d in range(len(shape))]
        return self.side(name, dim).reshape(wanted).expand(shape)

    def _long(self, name: str) -> list[int]:
        return [dim for dim, size in enumerate(self.shapes[name]) if size > 1]

    def _places(self, weight: Weight) -> list[tuple[list[Side], Tensor]]:
        """Sides and coordinates of a view, for every dimension longer than 1 of its parameters."""
        if weight.name is not None:
            own = weight.name
            return [
                ([(own, dim)], weight.of_table(self._laid(own, dim))) for dim in self._long(own)
            ]
        found: dict[int, tuple[list[Side], Tensor]] = {}
        for name in self.parameters_of(weight):
            local = weight.index - self.offsets[name]
            inside = (local >= 0) & (local < prod(self.shapes[name]))
            for dim in self._long(name):
                sides, ids = found.setdefault(dim, ([], torch.full(weight.index.shape, ROOT)))
                sides.append((name, dim))
                ids[inside] = self._laid(name, dim).reshape(-1)[local[inside]]
        return [(sides, compress(ids)) for sides, ids in found.values()]

    def attach(self, weight: Weight) -> Tensor:
        """A parameter as an activation: its last dimension holds features, others do not."""
        for name in self.parameters_of(weight):
            for dim in self._long(name)[:-1]:
                self._fix(self.side(name, dim), "its rows are told apart")
        if weight.shift:
            self.fix_weights([weight], "a constant is added to a parameter")
            return constant(weight.shape)
        ids = compress(self.laid_out(weight, self._table))
        self._used.append(self.demands.members(ids))
        return ids

    def _table(self, name: str) -> Tensor:
        long = self._long(name)
        return self._laid(name, long[-1]) if long else constant(self.shapes[name])

    def given(self, kind: str, name: str, shape: Sequence[int]) -> Tensor:
        """Inputs and buffers do not change; the values of buffers are known."""
        ids = constant(shape)
        if kind == "buffer" and name in self._buffers:
            ids = ids.expand(ids.shape)
            ids.known = self._buffers[name].detach().cpu()  # type: ignore[attr-defined]
        return ids

    def fix_unused(self) -> None:
        """Fix what no operation read or wrote: nothing is known of it."""
        every = np.concatenate([ids.numpy() for ids in self.sides.values()] or [np.zeros(0, int)])
        used = np.concatenate(self._used or [np.zeros(0, int)])
        self.place = Place()
        self._fix(torch.from_numpy(np.setdiff1d(every, used)), "no operation uses it")

    # -- fixing

    def _fix(self, ids: Tensor, why: str) -> None:
        place = self.place
        self.demands.fix(ids, (place.op, place.module, place.source, why))

    def fix(self, value: Tensor) -> None:
        """Let coordinates never change."""
        self._fix(value, "it acts on each feature alone")

    def fix_weights(self, weights: Iterable[Weight], why: str) -> None:
        """Let all coordinates of parameters never change."""
        for weight in weights:
            for name in self.parameters_of(weight):
                for dim in self._long(name):
                    self._fix(self.side(name, dim), why)

    def pin(self, values: Iterable[Value], reason: str) -> None:
        """Fix the coordinates of the operands of an operation that is not followed."""
        for value in values:
            if isinstance(value, Weight):
                self.fix_weights([value], reason)
            else:
                self._fix(value, reason)

    def opaque(self, values: Sequence[Value], reason: str, dims: Sequence[int] = ()) -> Tensor:
        """Functions that are not linear."""
        self.pin(values, reason or "it acts on each feature alone")
        return constant(broadcast_shape(*(value.shape for value in values)))

    def observe(self, value: Tensor) -> Tensor:
        """A sign or a comparison of single features."""
        self._fix(value, "it acts on each feature alone")
        return constant(value.shape)

    def root(self, value: Tensor, degree: int) -> Tensor:
        """A root of single features."""
        return self.observe(value)

    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> Weight | None:
        """Matrices that data selects are not distinguished: they have the same features."""
        if len(weight.shape) < 3 or weight.name is None:
            return None
        for _, view in self._places(weight):
            if 0 in varying(view):
                self._fix(view, "data tells its matrices apart")
        return weight.moved(lambda t: t[:1].expand(prod(rows), *t.shape[1:]), self.offsets).moved(
            lambda t: t.unflatten(0, tuple(rows)), self.offsets
        )

    # -- each operation

    def apply(self, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Follow an operation that treats all features of a space alike; fix them for others."""
        result = self._applied(rule, args, kwargs)
        if self.place.node is not None:
            self._seen[self.place.node] = result
        return result

    def _applied(self, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        facts = facts_of(self.place.op)
        leaves = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | Weight)
        ]
        free = [leaf for leaf in leaves if self.carries(leaf)]
        if facts.kind in ("creation", "size"):
            return rule(self, *args, **kwargs)
        if not free and not any(bool((distinct(leaf) == NEUTRAL).any()) for leaf in leaves):
            return _constants(self.place.result)
        if free and not follows(self, facts, args, kwargs, leaves):
            self.pin(free, "it acts on each feature alone")
            return _constants(self.place.result)
        result = rule(self, *args, **kwargs)
        if facts.kind in ("concatenation", "write") and isinstance(result, Tensor):
            return self._assembled(result)
        return result

    def _assembled(self, result: Tensor) -> Tensor:
        """Pieces of one tensor in another order are a turn; other pieces remain told apart."""
        node = self.place.node
        if node is None or not self.has_space(result):
            self._fix(result, "it is put together from pieces")
            return result
        if (found := turned(node, result, self._seen)) is not None:
            source, rows = found
            if rows is not None:
                self.demands.mark(source)
                self.demands.turns.append(rows)
            return source
        self.demands.mark(result, narrowed(pieces_of(node), varying(result)))
        return result

    def has_space(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        ids = distinct(value)
        return bool(((ids != ROOT) & (ids != NEUTRAL)).any())

    def carries(self, value: Any) -> bool:
        return isinstance(value, Weight) or self.has_space(value)

    def is_product(self, ids: Tensor) -> bool:
        small = distinct(ids)
        return bool(((small >= PAIRS) & (small != NEUTRAL)).any())

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
                self._fix(ids, "squares are added to something else")
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
        return result

    def _equal(self, left: Tensor, right: Tensor) -> None:
        small = [distinct(ids) for ids in (left, right)]
        lone = [bool((ids == ROOT).any()) for ids in small]
        if any(lone):
            for ids in (left, right):
                self._fix(ids, "constants are added to features")
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
            self._fix(ids, "constants are added to features")
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
        rest = [ids for _, ids in factors if not self.has_space(ids)]
        if len(spaces) == 1 and spaces[0][0] == 2 and not rest:
            return self.demands.pairs(spaces[0][1], spaces[0][1])
        if len(spaces) == 2 and not rest and all(power == 1 for power, _ in spaces):
            return self.demands.pairs(spaces[0][1], spaces[1][1])
        for _, ids in spaces:
            self._fix(ids, "features are multiplied with each other")
        return constant(shape)

    def reduce(self, value: Value, dims: Iterable[int], keepdim: bool = False) -> Tensor:
        """Sums over other dimensions keep features; sums of features are dot products or means."""
        ids = self.activation(value)
        wanted = sorted({dim % ids.dim() for dim in dims}, reverse=True) if ids.dim() else []
        along = varying(ids) & set(wanted)
        if along and self.has_space(ids):
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
        kind = facts_of(self.place.op).kind
        rest = varying(ids) - along
        labels = position(distinct(ids).shape, sorted(rest))
        if self.is_product(ids):
            if bool((is_coordinate(distinct(ids))).any()):
                self._fix(ids, "squares are added to something else")
                return
            left, right = self.demands.factors(distinct(ids))
            lone = (left == ROOT) ^ (right == ROOT)
            if bool(lone.any()):
                self._fix(ids, "features are multiplied with each other")
                return
            for side in (left, right):
                self.demands.mark(side, labels)
            self.demands.unify(left, right, dual=True)
        elif kind in ("total", "mean") and not bool((distinct(ids) == ROOT).any()):
            self.demands.mark(ids, labels)
            self.demands.ones.append(self.demands.members(ids))
        elif kind == "norm" and not bool((distinct(ids) == ROOT).any()):
            self._normed(ids, labels, mean=not self.place.op.endswith("norm"))
        else:
            self._fix(ids, "its features are summed up or compared")

    def _normed(self, ids: Tensor, labels: Tensor, mean: bool) -> None:
        self.demands.mark(ids, labels)
        self.demands.unify(ids, ids, dual=True)
        if mean:
            self.demands.ones.append(self.demands.members(ids))

    def cut(self, value: Value, dims: Sequence[int], exact: bool = False) -> Tensor:
        """A normalisation keeps the length, and the mean unless it is that of the root mean square."""
        ids = self.activation(value)
        wanted = {dim % ids.dim() for dim in dims}
        along, small = varying(ids), distinct(ids)
        if not self.has_space(ids):
            return constant(ids.shape)
        if not along & wanted or self.is_product(ids) or bool((small == ROOT).any()):
            self._fix(ids, "each of its features is normalised alone")
            return constant(ids.shape)
        labels = position(small.shape, sorted(along - wanted))
        self._normed(ids, labels, mean=not self.place.op.endswith("rms_norm"))
        return ids

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
        if weight.shift:
            self.fix_weights([weight], "a constant is added to a parameter")
        places = [(sides, view.expand(full)) for sides, view in self._places(weight)]
        out_shape = [size for dim, size in enumerate(full) if dim not in summed]
        if self.is_product(ids):
            self._fix(ids, "squares are weighted")
            self.fix_weights([weight], "squares are weighted")
            return constant(out_shape)
        reads = [(sides, view) for sides, view in places if varying(view) & summed]
        self.reads.update(side for sides, _ in reads for side in sides)
        writes = [view for _, view in places if varying(view) and not varying(view) & summed]
        for _, view in places:
            self._used.append(self.demands.members(view))
            if not varying(view):
                self._fix(view, "its positions are told apart")
        along, beside = varying(ids) & summed, varying(ids) - summed
        if writes and (wide & varying(writes[-1]) or beside & set().union(*map(varying, writes))):
            # (a matrix for each feature)
            self._fix(ids, ALONE)
            self.fix_weights([weight], ALONE)
            return constant(out_shape)
        if not bool((distinct(ids) == NEUTRAL).all()):
            read = [view for _, view in reads if varying(view) & along]
            for _, view in reads:
                if len(read) != 1 or view is not read[0] or not self.has_space(ids):
                    self._fix(view, "it reads an input, positions, or what does not change")
            if len(read) == 1 and along <= varying(read[0]) and self.has_space(ids):
                self._read(read[0], ids, summed)
            elif along:
                self._fix(ids, "its features are read in several dimensions")
        if beside and not along and self.has_space(ids):
            # the features are beside the sum, which mixes positions
            for view in writes:
                self._fix(view, "it mixes positions")
            return self._out(ids, summed)
        if not writes:
            return constant(out_shape)
        for view in writes[:-1]:
            self._fix(view, "it numbers matrices")
        return self._out(writes[-1], summed)

    def _read(self, view: Tensor, ids: Tensor, summed: set[int]) -> None:
        small, rest = distinct(ids), sorted(varying(ids) - summed)
        ranks = ranks_of(ids, varying(ids) & summed)
        if bool((small == ROOT).any()) or (rest and bool((ranks > 0).any())):
            for part in (view, ids):
                self._fix(part, "it reads features together with what does not change")
            return
        self.demands.mark(ids, position(small.shape, rest))
        self.demands.mark(view, ranks if not rest else None)
        self.demands.unify(ids, view, dual=True)

    def _gained(self, weight: Weight, ids: Tensor, full: Sequence[int]) -> Tensor:
        """Features, each times a parameter: coordinates of another basis."""
        along = varying(ids)
        places = weight.positions(self.offsets).expand(full)
        own, name = varying(places), weight.name
        if own < along:
            # one factor for many features
            self.demands.mark(ids, position(distinct(ids).shape, sorted(own)))
            return ids
        twice = name is not None and self.shifts.setdefault(name, weight.shift) != weight.shift
        plain = bool(is_coordinate(distinct(ids)).all())
        if name is None or own != along or twice or not plain or weight.kept is not None:
            self._fix(ids, ALONE)
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


def _constants(shown: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: constant(shape_of(leaf)) if isinstance(leaf, Tensor) else leaf, shown
    )
