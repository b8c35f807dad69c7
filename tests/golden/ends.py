"""Digests of tails and heads that do not depend on how units are numbered, on the basis that
products of scales are written in, or on which sizes of 1 the ids are stored with.

Every id stands for a sum of log-scales. Ids are visited in the order in which the tensors, sorted
by name, first use them. An id that is independent of the ids before it gets the next label; every
other id is a sum of labels, with coefficients that are unique. Two graphs have the same digest
exactly if every tail and every head is the same sum of labels in both, which means that they
have the same rescalings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from scipy.sparse import csr_array

import pathspace as ps

Sum = dict[int, Fraction]


def ends_digest(graph: ps.ReductionGraph, exact: bool = False) -> str:
    """Digest of all tails, heads, running statistics and unused scalars.

    Args:
        graph: the reduction graph.
        exact: only rescalings that are exact for the unchanged model.
    """
    forms = csr_array(graph.expand)[:, 1:]
    if exact:
        forms = csr_array(forms @ graph.exact)
    sides = sorted(_sides(graph), key=lambda side: side[0])
    numbers = _numbered(forms, [ids for _, ids in sides])
    result = hashlib.sha256(repr(numbers.sums).encode())
    for name, ids in sides:
        _add(result, name, numbers.of[np.abs(ids)] * np.sign(ids))
    if not exact:
        for block in sorted(graph.blocks, key=lambda block: block.name):
            result.update(f"{block.name} {block.shape} {block.shift}".encode())
            if block.unused is not None:
                _add(result, "unused", block.unused.numpy().astype(np.int64))
    return result.hexdigest()[:12]


def _sides(graph: ps.ReductionGraph) -> Iterator[tuple[str, np.ndarray]]:
    """Every array of ids with a name of its own."""
    for name, pair in graph.whole_ends.items():
        for side, ids in zip(("tail", "head"), pair, strict=True):
            yield f"{name} {side}", ids.numpy()
    for entry in graph.statistics:
        for name, power in entry.powers.items():
            yield f"{name} statistic {power}", entry.units.numpy()


class _Numbers:
    """Numbers of ids: ``of[id]`` is ``k`` or ``-k`` for the sum ``sums[k - 1]`` or its
    opposite, and 0 for the root.
    """

    def __init__(self, forms: csr_array) -> None:
        self.of = np.zeros(forms.shape[0], np.int64)
        self._uses = np.bincount(forms.indices, minlength=forms.shape[1])
        self.sums: list[tuple[tuple[int, int, int], ...]] = []
        self._known: dict[tuple[tuple[int, int, int], ...], int] = {}
        self._pivots: dict[int, tuple[int, Sum, Sum]] = {}

    def add(self, number: int, form: Sum) -> None:
        """Give an id its number; ``form`` is its sum of log-scales of units."""
        total = self._reduced(form)
        if not total:
            return
        sign = 1 if total[min(total)] > 0 else -1
        key = tuple(
            (label, int(sign * value.numerator), value.denominator)
            for label, value in sorted(total.items())
        )
        known = self._known.setdefault(key, len(self.sums) + 1)
        if known > len(self.sums):
            self.sums.append(key)
        self.of[number] = sign * known

    def _reduced(self, form: Sum) -> Sum:
        """The form as a sum of labels, with a new label if it is independent of those so far."""
        rest, total = dict(form), Sum()
        while columns := [column for column in rest if column in self._pivots]:
            column = min(columns, key=lambda column: self._pivots[column][0])
            _, pivot, meaning = self._pivots[column]
            factor = rest[column] / pivot[column]
            _subtract(rest, pivot, factor)
            _subtract(total, meaning, -factor)
        if rest:
            label = len(self._pivots)
            meaning = {label: Fraction(1)}
            _subtract(meaning, total, Fraction(1))
            # (a unit that many sums share would make chains of eliminations)
            rarest = min(rest, key=lambda column: self._uses[column])
            self._pivots[rarest] = label, rest, meaning
            return {label: Fraction(1)}
        return total


def _subtract(target: Sum, other: Sum, factor: Fraction) -> None:
    """``target -= factor * other``, without zeros."""
    for key, value in other.items():
        target[key] = target.get(key, Fraction(0)) - factor * value
        if not target[key]:
            del target[key]


def _numbered(forms: csr_array, arrays: list[np.ndarray]) -> _Numbers:
    """Number all ids in the order of their first use."""
    numbers = _Numbers(forms)
    seen = np.zeros(forms.shape[0], bool)
    seen[0] = True
    for ids in arrays:
        values, first = np.unique(ids, return_index=True)
        for number in values[np.argsort(first)].tolist():
            if not seen[abs(number)]:
                seen[abs(number)] = True
                # (the sign of the first use is the sign of the label)
                part = slice(forms.indptr[abs(number)], forms.indptr[abs(number) + 1])
                sign = 1 if number > 0 else -1
                form = {
                    column: Fraction(sign * value)
                    for column, value in zip(
                        forms.indices[part].tolist(), forms.data[part].tolist(), strict=True
                    )
                    if value
                }
                numbers.add(abs(number), form)
                numbers.of[abs(number)] *= sign
    return numbers


def _add(result: hashlib._Hash, name: str, values: np.ndarray) -> None:
    """Add an array, with size 1 along the dimensions in which it is constant."""
    for dim in range(values.ndim):
        first = values.take([0], dim) if values.shape[dim] else values
        if values.shape[dim] > 1 and (values == first).all():
            values = first
    result.update(f"{name} {values.shape}".encode())
    result.update(np.ascontiguousarray(values, np.int64).tobytes())
