"""Which elements share a scale: the interpretation whose ids are units.

Equations ``phi(a) = phi(b)`` are collected while the graph is interpreted, and solved at the end.
A scalar used as an activation is an edge from the root, and has one id in all such uses. An index
that data determines makes a virtual weight of the rows that it selects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm, prod
from typing import Any, Self

import torch
from torch import Tensor

from ..capture.captured import place as node_place
from ..graph.parts import Pin
from .handwritten_norms import constant_behind
from .records import Flows, Memory, Powers, distinct_columns, expanded_ids, memory, use_of
from .registry import facts_of, operation_name
from .relations import Relations
from .semantics import Semantics
from .sides import varying
from .values import (
    NEUTRAL,
    ROOT,
    Value,
    Weight,
    broadcast_shape,
    constant,
    distinct,
    distinct_together,
    has_zeros,
    reshaped,
)

# above these numbers of different scales at one weight, all are unified, which is sound
EXACT_USES = 20_000
EXACT_RESULTS = 20_000
# if data selects more scalars of a table than this, all of its rows are treated as one
MOST_GATHERED = 4_000_000
UNLIKE = "different constants are added to this parameter"
SHARED = "norms with different eps divide by one running variance"
READ = "running statistics are read by something else than their normalisation"


class Scales(Semantics):
    """The interpretation whose nodes are units: elements that must share a scale are unified."""

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(offsets, shapes)
        self.equations = Relations()
        self.flows = Flows()
        # ids of the scalars of parameters used as activations, laid out like the parameter
        self._tables: dict[str, Tensor] = {}
        # parameter -> the constant that is added to it in every use
        self.shifts: dict[str, float] = {}
        # virtual weight -> the number of its index
        self.gathers: dict[str, int] = {}
        # run and node of an index -> its number
        self._indices: dict[tuple[int, object], int] = {}
        # pairs of running mean and variance; statistic -> its power of the channels' scales, and
        # ids of the channels; variance -> the eps that is added to it; statistics used as data
        self._pairs: dict[tuple[str, str], None] = {}
        self._channels: dict[str, tuple[int, Tensor]] = {}
        self._eps: dict[str, float] = {}
        self._read: set[str] = set()
        # memory of ids -> these ids, and fewer ids with the same scales
        self._tied: dict[Memory, tuple[Tensor, Tensor]] = {}
        self._powers = Powers()
        self.cuts: list[Tensor] = []
        self.observes = False
        # operations that read a constant -> the number of their pin
        self._constants: dict[tuple[str, str, str, str], int] = {}

    def copy(self) -> Self:
        """A copy in which the ends of weights can be looked at, which adds equations."""
        twin = copy.copy(self)
        twin.equations, twin.approximate = self.equations.copy(), [*self.approximate]
        return twin

    def activation(self, value: Any) -> Tensor:
        """Any value as an activation; ids known to be equal are replaced by one of them."""
        ids = super().activation(value)
        held = self._tied.get(memory(ids))
        if held is None:
            return ids
        # (what is read of the representatives is read of all the ids)
        self.flows.into(distinct(held[0]), distinct(held[1].expand(held[0].shape)))
        return expanded_ids(held[1], ids.shape)

    def join(self, *values: Value) -> Tensor:
        """Unify the operands elementwise."""
        ids = [self.activation(value) for value in values]
        shape = broadcast_shape(*(entry.shape for entry in ids))
        # the operand with the fewest ids represents all (exact zeros cannot represent others)
        ids.sort(key=lambda entry: (has_zeros(entry), distinct(entry).numel()))
        result, void = ids[0].expand(shape), has_zeros(ids[0])
        for other in ids[1:]:
            other = other.expand(shape)
            self._flow(other, result)
            if void:
                result = torch.where(result == NEUTRAL, other, result)
                void = has_zeros(result)
        return result

    def known_ids(self, values: Iterable[Value]) -> Callable[[Tensor], bool]:
        """A test of whether ids are those of operands, those that represent them, or new."""
        first, known, parameters = self.equations.size, [torch.tensor([ROOT, NEUTRAL])], False
        for value in values:
            if isinstance(value, Weight):
                parameters = True
            else:
                forms = (value, self.activation(value), self._powers.base(value))
                known += [distinct(ids).reshape(-1).abs() for ids in forms]

        def test(ids: Tensor) -> bool:
            if ids.dtype != torch.int64:
                return False
            few = distinct(ids).abs()
            old = few[(few < first) | (few >= self.equations.size)]
            return parameters or bool(torch.isin(old, torch.cat(known)).all())

        return test

    def _flow(self, source: Tensor, target: Tensor) -> None:
        pairs = self.equations.unify(source, target)
        if pairs is not None:
            source, target = torch.broadcast_tensors(source, target)
            self.flows.into(distinct(source), distinct(target))
            left, right = pairs
            if not (left.all() and right.all()):
                self._meets_constant(int(((left == ROOT) | (right == ROOT)).sum()))

    def _meets_constant(self, elements: int) -> None:
        place = self.place
        if place.node is None:
            return
        found, writer = constant_behind(place.node, self.sources)
        if found:
            key = (place.op, place.module, place.source, f"shares one scale with {found}")
            if writer is not None and facts_of(place.node).linear == "each":
                # (a sum over windows, say, has no constants of its own)
                key = (operation_name(writer.target), *node_place(writer), key[-1])
            number = self._constants.setdefault(key, len(self.pins))
            if number == len(self.pins):
                self.pins.append(Pin(*key, elements))
            else:
                self.pins[number] = replace(
                    self.pins[number], elements=self.pins[number].elements + elements
                )

    def _sink(self, ids: Tensor) -> None:
        self.flows.end(self.equations.present(ids))

    def reduce(self, value: Value, dims: Iterable[int], keepdim: bool = False) -> Tensor:
        """Unify along the reduced dimensions."""
        if isinstance(value, Tensor) and (power := self._powers.whole(value)) is not None:
            # the summands share one scale, so one power after the sum is enough
            base, exponent = power
            return self.product((exponent, self.reduce(base, dims, keepdim)))
        wanted = {dim % len(value.shape) for dim in dims if len(value.shape)}
        if isinstance(value, Weight):
            self.attach_reduced(value, wanted)
        return super().reduce(value, wanted, keepdim)

    def merged(self, ids: Tensor, dims: Sequence[int]) -> Tensor:
        """Unify along dimensions and keep one entry of each, a zero only if alone."""
        few = first = distinct(ids)
        for dim in dims:
            if first.shape[dim] > 1:
                first = first.amin(dim, keepdim=True)
        differ = first is not few
        first = first.expand([1 if dim in dims else size for dim, size in enumerate(ids.shape)])
        if differ:
            self._flow(ids, first)
            if not has_zeros(few):
                self._tied[memory(ids)] = ids, first
        return first

    def contract(self, weight: Weight, value: Value, dims: Sequence[int]) -> Tensor:
        """Record the edges and return the ids of their heads."""
        self._note_shift(weight)
        ids = self.activation(value)
        full = broadcast_shape(weight.shape, ids.shape)
        ids, rank = ids.expand(full), len(full)
        reduced = {dim % rank for dim in dims}
        empty = distinct(ids) == NEUTRAL
        for dim in reduced:
            empty = empty.all(dim, keepdim=True)
        if bool(empty.all()):
            return constant([n for dim, n in enumerate(full) if dim not in reduced], NEUTRAL)
        # dimensions along which the scalar weight is the same: its tail and
        # head must not vary there
        varies = {rank - len(weight.shape) + dim for dim in varying(weight.index)}
        shared = [dim for dim in range(rank) if dim not in varies]
        free = [dim for dim in shared if dim in varying(ids) and dim not in reduced]
        change, kept = None, sorted(varies - reduced)
        heads = prod(full[dim] for dim in (*free, *kept))
        if free and distinct(ids).numel() <= EXACT_USES and heads <= EXACT_RESULTS:
            ids, change = self._baseline(ids, free, kept)
        tail = self.merged(ids, shared)
        sizes = [full[dim] if dim in kept else 1 for dim in range(rank)]
        head = self.equations.fresh(sizes)
        self.flows.use(use_of(weight, tail, head))
        if change is not None:
            # change varies only along dimensions of the result, so no sum goes over it
            head = self.product((1, head), (1, change))
        if bool(empty.any()):
            # (a sum of zeros only, as of a window within a margin)
            head = torch.where(empty, NEUTRAL, head)
        wide = head.expand([1 if dim in reduced else size for dim, size in enumerate(full)])
        return self.dropped(wide, reduced)

    def _baseline(
        self, ids: Tensor, free: Sequence[int], kept: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Split several scales at one weight (of tokens, of positions): ``baseline + change``.

        The weight's factor is ``head - baseline``; ``change`` varies along dimensions that are not
        summed, and is part of the result's scale. The weight is constant along ``free`` dimensions
        of the result, and varies along those ``kept``.
        """
        full = ids.shape
        small = distinct(ids)
        first = small
        for dim in free:
            first = first.narrow(dim, 0, 1)
        if bool((small == first).all()):
            return first.expand(full), None
        fixed, summed = small == ROOT, [d for d in range(len(full)) if d not in (*free, *kept)]
        some = [fixed.any(dim=tuple(dims)) & ~fixed.all(dim=tuple(dims)) for dims in (free, summed)]
        if summed and all(bool(mixed.any()) for mixed in some):
            # (a window reads constants and others, and another window others alone)
            self._meets_constant(len(torch.unique(small[~fixed & (small != NEUTRAL)])))
        change = self.equations.fresh(
            [
                n if dim in free else small.shape[dim] if dim in kept else 1
                for dim, n in enumerate(full)
            ]
        )
        baseline = self.equations.fresh(
            [1 if dim in free else n for dim, n in enumerate(small.shape)]
        )
        void = (small == NEUTRAL).all(dim=tuple(free), keepdim=True)
        baseline = torch.where(void, NEUTRAL, baseline)
        self.equations.relate((1, small), (-1, baseline), (-1, change))
        for target in (baseline, change):
            self.flows.into(small, distinct(target.expand(small.shape)))
        return baseline.expand(full), change

    def observe(self, value: Tensor) -> Tensor:
        """Mark the elements as used, without a condition on their scale."""
        self._sink(value)
        self.observes = True
        return constant(value.shape)

    def statistics_of(self, mean: str, var: str, channels: Tensor, eps: float) -> None:
        """Record the channels of statistics, the same in all their uses.

        ``var + eps`` is rescaled, so all normalisations with this variance need the same ``eps``.
        """
        ids = self.merged(channels, range(1, channels.dim())).reshape(-1)
        self._pairs[mean, var] = None
        if self._eps.setdefault(var, eps) != eps:
            self.pin([ids], SHARED)
        for power, name in ((1, mean), (2, var)):
            before, known = self._channels.get(name, (power, ids))
            self.equations.unify(known, ids)
            # (a channel can be zero in one use, and not in another)
            self._channels[name] = before, torch.where(known == NEUTRAL, ids, known)
            if before != power:
                self.read(name)
            elif name in self._read:
                self.pin([ids], READ)

    def read(self, buffer: str) -> None:
        """Fix the channels of statistics that are used as data, now or later."""
        if buffer in self._channels and buffer not in self._read:
            self.pin([self._channels[buffer][1]], READ)
        self._read.add(buffer)

    def running(self) -> list[tuple[str | None, str | None, Tensor, float]]:
        """Running mean, running variance, ids of their channels, and eps; every statistic once."""
        left, found = set(self._channels), []
        for pair in self._pairs:
            mean, var = (name if name in left else None for name in pair)
            left -= set(pair)
            if mean or var:
                found.append((mean, var, self._channels[pair[0]][1], self._eps[pair[1]]))
        return found

    def product(self, *factors: tuple[int | Fraction, Tensor]) -> Tensor:
        """A new id whose log-scale is the sum of those of the factors."""
        ids = [entry for _, entry in factors]
        shape = broadcast_shape(*(entry.shape for entry in ids))
        if all(bool((distinct(entry) == ROOT).all()) for entry in ids):
            return constant(shape)
        wide = [entry.expand(shape) for entry in ids]
        powers = [Fraction(power) for power, _ in factors]
        if (known := self._single(powers, wide)) is not None:
            return known
        small = distinct_together(*ids)
        rows, which = distinct_columns(torch.stack([entry.reshape(-1) for entry in small]))
        out = self.equations.fresh((rows.shape[1],))
        whole = lcm(*(power.denominator for power in powers))
        terms = zip((int(-whole * power) for power in powers), rows, strict=True)
        self.equations.relate((whole, out), *terms)
        for row in rows:
            self.flows.into(row, out)
        # exact zeros are unchanged
        result = torch.cat([out, torch.tensor([NEUTRAL])])[which].reshape(small[0].shape)
        result = result.expand(shape)
        if len(wide) == 1:
            self._powers.note(result, wide[0], powers[0])
        return result

    def _single(self, powers: Sequence[Fraction], ids: Sequence[Tensor]) -> Tensor | None:
        """A product of powers of the same ids with a total power of 0, 1 or -1, or ``None``."""
        found = self._powers.common(powers, ids)
        if found is None or abs(found[1]) not in (0, 1):
            return None
        result, total = found
        if total == 0:
            # (a normalisation written out by hand)
            for entry in ids:
                self._sink(entry)
            return constant(result.shape)
        if total == -1:
            base, result = result, (-distinct(result)).expand(result.shape)
            self._powers.note(result, base, total)
        for entry in ids:
            self.flows.into(distinct(entry), distinct(result))
        return result

    def fix(self, value: Tensor) -> None:
        """Unify with the root."""
        value = self.activation(value)
        present = self.equations.present(value)
        self.equations.unify(present, constant(()))
        self._sink(present)

    def cut(self, value: Value, dims: Sequence[int], exact: bool = False) -> Tensor:
        """Unify over the normalised dimensions; the result has a fixed scale."""
        shared = self.reduce(value, dims, keepdim=True)
        self._sink(shared)
        self.cuts.append(shared)
        if not exact:
            self.approximate.append(shared)
        return constant(value.shape, ROOT)

    # -- parameters

    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> Weight | None:
        """A virtual weight with one row for each position of an index."""
        table = weight.name
        if table is None or weight.kept is not None or weight.shift or table in self.gathers:
            return None
        shape, step = self.shapes[table], prod(self.shapes[table][1:])
        # the view must keep the rows separate
        whole = (
            weight.shape[:1] == shape[:1]
            and weight.index.stride(0) == step > weight.index.storage_offset()
        )
        # with a single position, operations over several positions are not visible
        alone = len(rows) > 0 and (prod(rows) < 2 or 1 in rows[1:])
        # products with matrices need only ids of their rows and columns
        many = prod(rows) * (step if len(shape) < 3 else sum(shape[1:]))
        if not whole or alone or many > MOST_GATHERED:
            return None
        number = self._indices.setdefault((self.place.run, node), len(self._indices))
        name = f"{table}[{number}]"
        if name not in self.gathers:
            last = max(self.offsets, key=self.offsets.__getitem__)
            self.offsets[name] = self.offsets[last] + prod(self.shapes[last])
            self.shapes[name] = (prod(rows), *shape[1:])
            self.gathers[name] = number
            self.virtual[name] = table
        virtual = Weight.of(name, self.shapes[name])
        for function in weight.moves:
            virtual = virtual.moved(function, self.offsets)
        if virtual.name is None or virtual.index.stride() != weight.index.stride():
            return None
        return virtual.moved(lambda t: reshaped(t, (*rows, *t.shape[1:])), self.offsets)

    def attach(self, weight: Weight) -> Tensor:
        """Edges from the root to one id per scalar, the same in all such uses."""
        self._note_shift(weight)
        if weight.name in self.gathers and prod(self.shapes[weight.name]) > MOST_GATHERED:
            self.pin([weight], "more scalars picked by data than can be followed")
            return constant(weight.shape)
        return self.laid_out(weight, self._table)

    def _note_shift(self, weight: Weight) -> None:
        """Record the constant added to a parameter; several constants pin it."""
        for name in dict.fromkeys(
            self.virtual.get(name, name) for name in self.parameters_of(weight)
        ):
            if (
                self.shifts.setdefault(name, weight.shift) != weight.shift
                and name not in self.pinned_parameters
            ):
                self.pin([Weight.of(name, self.shapes[name])], UNLIKE)

    def _table(self, name: str, sizes: Sequence[int] | None = None) -> Tensor:
        """Ids of a whole parameter, created at its first use as an activation."""
        if name not in self._tables:
            shape = self.shapes[name]
            ids = self.equations.fresh(shape if sizes is None else sizes).expand(shape)
            self.flows.use(use_of(Weight.of(name, shape), constant([1] * len(shape)), ids))
            self._tables[name] = ids
        return self._tables[name]

    def attach_reduced(self, weight: Weight, dims: Collection[int]) -> None:
        """One id for all scalars of a parameter that a reduction adds up, if it has no ids yet.

        A standardised weight has as many ids as rows then, and not as many as scalars.
        """
        name = weight.name
        if name is None or weight.kept is not None:
            return
        shape, view = self.shapes[name], [*zip(weight.shape, weight.index.stride(), strict=True)]
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        rows = {view[dim] for dim in range(len(view)) if dim not in dims and view[dim][0] > 1}
        whole = prod(weight.shape) == prod(shape) and all(stride for size, stride in view)
        if whole and rows <= set(zip(shape, strides, strict=True)):
            self._table(
                name,
                [n if (n, stride) in rows else 1 for n, stride in zip(shape, strides, strict=True)],
            )
