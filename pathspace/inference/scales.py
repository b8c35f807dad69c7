"""Which elements share a scale: the interpretation whose ids are units.

Equations ``phi(a) = phi(b)`` are collected while the graph is interpreted, and solved at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from ..capture.captured import place as node_place
from ..graph.parts import Pin
from .eps_detection import constant_behind
from .parameter_scales import ParameterScales, RunningStatistics
from .records import Memory, Powers, distinct_columns, expanded_ids, memory, use_of
from .registry import facts_of, operation_name
from .sides import varying
from .values import (
    NEUTRAL,
    ROOT,
    Value,
    Weight,
    broadcast_shape,
    constant,
    distinct,
    has_zeros,
)

# above these numbers of different scales at one weight, all are unified, which is sound
EXACT_USES = 20_000
EXACT_RESULTS = 20_000


class Scales(ParameterScales):
    """The interpretation whose nodes are units: elements that must share a scale are unified."""

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(offsets, shapes)
        self.running = RunningStatistics(self.equations)
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

    def _representative(self, ids: Tensor, dims: Iterable[int]) -> Tensor:
        """Unify along dimensions and keep one entry of each, a zero only if alone."""
        wanted, few = list(dims), distinct(ids)
        if any(ids.shape[dim] == 0 for dim in wanted):
            # (a sum of nothing is zero)
            return constant(
                [1 if dim in wanted else size for dim, size in enumerate(ids.shape)], NEUTRAL
            )
        first = few
        for dim in wanted:
            if first.shape[dim] > 1:
                first = first.amin(dim, keepdim=True)
        differ = first is not few
        first = first.expand([1 if dim in wanted else size for dim, size in enumerate(ids.shape)])
        if differ:
            self._flow(ids, first)
            if not has_zeros(few):
                self._tied[memory(ids)] = ids, first
        return first

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
        rank = len(value.shape)
        wanted = sorted({dim % rank for dim in dims if rank}, reverse=True)
        if isinstance(value, Weight):
            self.attach_reduced(value, wanted)
        ids = self._representative(self.activation(value), wanted)
        if not keepdim:
            for dim in wanted:
                ids = ids.select(dim, 0)
        return ids

    def contract(self, weight: Weight, value: Value, dims: Sequence[int]) -> Tensor:
        """Record the edges and return the ids of their heads."""
        self._note_shift(weight)
        ids = self.activation(value)
        rank = max(ids.dim(), len(weight.shape))
        full = broadcast_shape(weight.shape, ids.shape)
        # dimensions along which the scalar weight is the same: its tail and
        # head must not vary there
        lead = rank - len(weight.shape)
        varies = {lead + dim for dim in varying(weight.index)}
        ids = ids.expand(full)
        shared = [dim for dim in range(rank) if dim not in varies]
        reduced = {dim % rank for dim in dims}
        free = [dim for dim in shared if dim in varying(ids) and dim not in reduced]
        change = empty = None
        out = tuple(size for dim, size in enumerate(full) if dim not in reduced)
        if has_zeros(distinct(ids)):
            empty = distinct(ids) == NEUTRAL
            for dim in reduced:
                empty = empty.all(dim, keepdim=True)
            if bool(empty.all()):
                return constant(out, NEUTRAL)
        kept = sorted(varies - reduced)
        heads = prod(full[dim] for dim in (*free, *kept))
        if free and distinct(ids).numel() <= EXACT_USES and heads <= EXACT_RESULTS:
            ids, change = self._baseline(ids, free, kept)
        tail = self._representative(ids, shared)
        sizes = [full[dim] if dim in kept else 1 for dim in range(rank)]
        head = self.equations.fresh(sizes)
        self.flows.use(use_of(weight, tail, head))
        if change is not None:
            # change varies only along dimensions of the result, so no sum goes over it
            head = self.product((1, head), (1, change))
        if empty is not None and bool(empty.any()):
            # (a sum of zeros only, as of a window within a margin)
            head = torch.where(empty, NEUTRAL, head)
        result = head.expand([1 if dim in reduced else size for dim, size in enumerate(full)])
        for dim in sorted(reduced, reverse=True):
            result = result.select(dim, 0)
        return result

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
        void = (small == NEUTRAL).all(dim=tuple(free), keepdim=True) if has_zeros(small) else None
        if void is not None:
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
        """Record the channels of statistics, the same in all their uses."""
        ids = self._representative(channels, range(1, channels.dim())).reshape(-1)
        for some, reason in self.running.add(mean, var, ids, eps):
            self.pin([some], reason)

    def read(self, buffer: str) -> None:
        """Fix the channels of statistics that are used as data, now or later."""
        for some, reason in self.running.read(buffer):
            self.pin([some], reason)

    def product(self, *factors: tuple[int, Tensor]) -> Tensor:
        """A new id whose log-scale is the sum of those of the factors."""
        ids = [entry for _, entry in factors]
        shape = broadcast_shape(*(entry.shape for entry in ids))
        if all(bool((distinct(entry) == ROOT).all()) for entry in ids):
            return constant(shape)
        wide = [entry.expand(shape) for entry in ids]
        powers = [Fraction(power) for power, _ in factors]
        if (known := self._single(powers, wide)) is not None:
            return known
        sizes = [
            n if any(entry.stride(dim) for entry in wide) else 1 for dim, n in enumerate(shape)
        ]
        small = [entry[tuple(slice(0, n) for n in sizes)] for entry in wide]
        rows, which = distinct_columns(torch.stack([entry.reshape(-1) for entry in small]))
        out = self.equations.fresh((rows.shape[1],))
        self.equations.relate(
            (1, out), *((-power, row) for (power, _), row in zip(factors, rows, strict=True))
        )
        for row in rows:
            self.flows.into(row, out)
        # exact zeros are unchanged
        result = torch.cat([out, torch.tensor([NEUTRAL])])[which].reshape(sizes).expand(shape)
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

    def root(self, value: Tensor, degree: int) -> Tensor:
        """A new id whose log-scale times ``degree`` is that of the operand."""
        if bool((distinct(value) == ROOT).all()):
            return value
        if (known := self._single([Fraction(1, degree)], [value])) is not None:
            return known
        sizes = [n if stride else 1 for n, stride in zip(value.shape, value.stride(), strict=True)]
        small = value[tuple(slice(0, n) for n in sizes)]
        out = torch.where(small == NEUTRAL, NEUTRAL, self.equations.fresh(sizes))
        self.equations.relate((degree, out), (-1, small))
        self.flows.into(small, out)
        result = out.expand(value.shape)
        self._powers.note(result, value, Fraction(1, degree))
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
