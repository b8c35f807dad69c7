"""Log-scales that are sums of log-scales: products of activations, and matrices reused in depth.

Besides equations between two ids, operations impose relations with more terms: the product of two
activations has ``phi(out) = phi(a) + phi(b)``, and a matrix used twice imposes ``phi(head') -
phi(head) = phi(tail') - phi(tail) = c`` with one number ``c`` for the whole matrix. Most of them
become equations of two ids after the others are solved (an operand equals the root, or ``c =
0``). The rest is eliminated exactly over the integers: some ids become *derived*, integer
combinations of base units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array, vstack
from torch import Tensor

from ..graph.parts import sums_of
from .elimination import (
    LARGEST_POWER,
    Round,
    eliminated,
    first_alike,
    reduced,
    row_differences,
    scattered,
)
from .union_find import UnionFind, looked_up, representatives
from .values import NEUTRAL, distinct_together


@dataclass(frozen=True)
class Solution:
    """Every id in terms of base units.

    ``classes`` has the signed class of every raw id: 0 for the root, ``1..units`` for base units;
    class ``units + 1 + i`` has the log-scale ``forms[i] @ phi``.
    """

    classes: np.ndarray
    units: int
    forms: csr_array

    @classmethod
    def of(cls, classes: np.ndarray, sums: csr_array) -> Solution:
        """A solution from classes whose log-scales are sums of those of the root and of units, in a
        row for each class; equal and opposite sums become one class.
        """
        units = sums.shape[1] - 1
        sums.eliminate_zeros()
        sums.sort_indices()
        terms = np.diff(sums.indptr)
        filled = np.flatnonzero(terms)
        start = sums.indptr[filled]
        sign, number = np.ones(len(terms), np.int64), np.zeros(len(terms), np.int64)
        sign[filled] = np.sign(sums.data[start])
        alone = (terms[filled] == 1) & (np.abs(sums.data[start]) == 1)
        number[filled[alone]] = sums.indices[start[alone]]
        rest = filled[~alone]
        forms = csr_array(sums[rest, 1:].multiply(sign[rest][:, None]))
        kept, which = np.unique(first_alike(forms), return_inverse=True)
        number[rest] = 1 + units + which
        return cls(looked_up(number * sign, classes), units, csr_array(forms[kept]))

    @cached_property
    def sums(self) -> csr_array:
        """The log-scale of each class as a sum of those of root and units."""
        return sums_of(self.forms)

    def units_in(self, classes: np.ndarray) -> np.ndarray:
        """Mask of the root and the units among classes and inside of derived ones."""
        met = np.zeros(self.units + 1, bool)
        met[self.sums[np.unique(np.abs(classes))].indices] = True
        return met

    def fixed(self, units: np.ndarray) -> Solution:
        """The solution with the log-scales of some base units (numbers from 1) fixed at 0."""
        keep = np.ones(self.units + 1, bool)
        keep[units] = False
        return Solution.of(self.classes, csr_array(self.sums[:, keep]))


class Relations(UnionFind):
    """Equations and relations between signed ids.

    Example:
        >>> scales = Relations()
        >>> a, b, out = (scales.fresh((1,)) for _ in range(3))
        >>> scales.relate((1, out), (-1, a), (-1, b))  # out = a * b
        >>> solution = scales.resolve()
        >>> solution.units, solution.forms.toarray().tolist()
        (2, [[1, 1]])
        >>> _ = scales.unify(b, out)  # then a is fixed
        >>> scales.resolve().units
        1
    """

    def __init__(self) -> None:
        super().__init__()
        # coefficients, and positive ids, in rows
        self._relations: list[csr_array] = []
        # number of scales that were fixed because they are too high a power of others, and
        # whether the solution lacks any for that reason, or for relations in circles
        self.too_high = 0
        self.incomplete = False

    def relate(self, *terms: tuple[int, Tensor]) -> None:
        """Record ``sum of coefficient * phi(ids) = 0``, elementwise."""
        ids = distinct_together(*(entry for _, entry in terms))
        rows = torch.stack([entry.reshape(-1) for entry in ids], 1)
        table = rows[(rows != NEUTRAL).all(1)].numpy()
        if len(table):
            places = np.repeat(np.arange(len(table)), len(terms)), np.abs(table).reshape(-1)
            data = (np.array([c for c, _ in terms], np.int64) * np.sign(table)).reshape(-1)
            self.add(csr_array(coo_array((data, places), shape=(len(table), self.size))))

    def add(self, relations: csr_array) -> None:
        """Record relations: a row for each, with its coefficient of every id."""
        self._relations.append(relations)

    def collapse(self) -> tuple[np.ndarray, csr_array]:
        """Solve until no relation is an equation; classes, and the relations between them."""
        while True:
            classes = self.solve()
            for relations in self._relations:
                relations.resize(relations.shape[0], self.size)
            every = vstack([csr_array((0, self.size), dtype=np.int64), *self._relations])
            total = int(np.abs(classes).max(initial=0))
            matrix = reduced(csr_array(csr_array(every) @ renaming(classes, total + 1)))
            first = representatives(classes)
            self._relations = [csr_array(matrix @ renaming(first, self.size))]
            # (with equations between units, edges of a skeleton can reach more of those left)
            more = csr_array(vstack([matrix, reduced(row_differences(matrix))], format="csr"))
            terms = np.diff(more.indptr)
            start, end = more.indptr[:-1][terms < 3], more.indptr[1:][terms < 3] - 1
            # (two terms of equal size have no common factor)
            equal = np.abs(more.data[start] * more.data[end]) == 1
            start, end = start[equal], end[equal]
            if not len(start):
                return classes, matrix
            other = np.where(start == end, 0, -more.data[end] * more.indices[end])
            pair = (looked_up(first, side) for side in (more.indices[start], other))
            self.unify(*map(torch.from_numpy, pair))

    def resolve(self) -> Solution:
        """Solve all: base units, and derived classes as integer combinations of them."""
        while True:
            classes, matrix = self.collapse()
            first = representatives(classes)
            rounds, rest = eliminated(matrix)
            if rest.shape[0]:
                # (of relations such as ``3 a = 4 b``, fixing one variable is sound)
                uses = np.bincount(rest.indices, minlength=rest.shape[1])
                row = np.repeat(np.arange(rest.shape[0]), np.diff(rest.indptr))
                order = np.lexsort((uses[rest.indices], row))
                self._fix(first[np.unique(rest.indices[order][rest.indptr[1:] - 1])])
                continue
            known, high = _expressed(rounds, matrix.shape[1])
            if not len(high):
                return Solution.of(classes, known)
            self.too_high += len(high)
            self._fix(first[high])

    def _fix(self, ids: np.ndarray) -> None:
        self.incomplete = True
        fixed = torch.from_numpy(ids)
        self.unify(fixed, torch.zeros_like(fixed))


def renaming(names: np.ndarray, count: int) -> csr_array:
    """The matrix that gives column ``i`` the signed name ``names[i]``; columns named 0 are lost."""
    parts = np.sign(names), np.abs(names), np.arange(len(names) + 1)
    return csr_array(parts, shape=(len(names), count))


def _expressed(rounds: list[Round], count: int) -> tuple[csr_array, np.ndarray]:
    """Root and variables as sums of those not eliminated; and those of too high powers."""
    base = np.ones(count, bool)
    for names, _ in rounds:
        base[names] = False
    known = scattered(np.flatnonzero(base), count)
    for names, forms in reversed(rounds):
        # both factors are below the limit, so float64 is exact enough to detect powers above it
        sizes = abs(forms).astype(np.float64) @ abs(known).astype(np.float64)
        if sizes.nnz and sizes.max() > LARGEST_POWER:
            return known, names[np.unique(coo_array(sizes > LARGEST_POWER).row)]
        known = csr_array(known + scattered(names, count) @ csr_array(forms @ known))
    return known, np.zeros(0, np.int64)
