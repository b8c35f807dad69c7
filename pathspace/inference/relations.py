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

import numpy as np
import torch
from flint import fmpz_mat
from scipy.sparse import coo_array, csr_array
from torch import Tensor

from .elimination import (
    LARGEST_POWER,
    Rounds,
    compress_relations,
    eliminate_shared,
    equations,
    forms_of,
    implied,
    multiples,
    peel,
    simplified,
)
from .union_find import UnionFind, looked_up, representatives
from .values import NEUTRAL

MAX_ELIMINATED = 30_000
# relations, and variables, that are solved as one matrix
MAX_DENSE = 400
WIDTH = 4


@dataclass(frozen=True)
class Solution:
    """Every id in terms of base units.

    ``classes`` has the signed class of every raw id: 0 for the root, ``1..units`` for base units;
    class ``units + 1 + i`` has the log-scale ``forms[i] @ phi``.
    """

    classes: np.ndarray
    units: int
    forms: csr_array

    def units_in(self, classes: np.ndarray) -> np.ndarray:
        """Mask of the root and the units among classes and inside of derived ones."""
        met = np.zeros(self.units + 1, bool)
        number = np.unique(np.abs(classes))
        met[number[number <= self.units]] = True
        met[self.forms[number[number > self.units] - self.units - 1].indices + 1] = True
        return met

    def fixed(self, units: np.ndarray) -> Solution:
        """The solution with the log-scales of some base units (numbers from 1) fixed at 0."""
        keep = np.ones(self.units, bool)
        keep[units - 1] = False
        forms = csr_array(self.forms[:, keep])
        terms = np.diff(forms.indptr)
        # a form can become empty, or a single base unit
        alone = np.flatnonzero(terms == 1)
        only = np.zeros(len(terms), np.int64)
        only[alone] = forms.data[forms.indptr[alone]]
        same = np.abs(only) == 1
        derived = ~same & (terms > 0)
        number = np.zeros(1 + self.units + len(terms), np.int64)
        number[1 : self.units + 1][keep] = np.arange(1, int(keep.sum()) + 1)
        rows = np.flatnonzero(same)
        number[self.units + 1 + rows] = only[rows] * (1 + forms.indices[forms.indptr[rows]])
        number[self.units + 1 :][derived] = 1 + int(keep.sum()) + np.arange(int(derived.sum()))
        return Solution(looked_up(number, self.classes), int(keep.sum()), csr_array(forms[derived]))


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
        self._relations: list[tuple[np.ndarray, np.ndarray]] = []
        # number of scales that were fixed because they are too high a power of others, and
        # whether the solution lacks any for that reason, or for relations in circles
        self.too_high = 0
        self.incomplete = False

    def relate(self, *terms: tuple[int, Tensor]) -> None:
        """Record ``sum of coefficient * phi(ids) = 0`` for up to four terms, elementwise."""
        ids = torch.broadcast_tensors(*(entry for _, entry in terms))
        for dim in range(ids[0].dim()):
            if ids[0].shape[dim] > 1 and all(entry.stride(dim) == 0 for entry in ids):
                ids = tuple(entry.narrow(dim, 0, 1) for entry in ids)
        rows = torch.stack([entry.reshape(-1) for entry in ids], 1)
        table = rows[(rows != NEUTRAL).all(1)].numpy()
        if len(table):
            self.relate_rows(
                np.broadcast_to(np.array([c for c, _ in terms], np.int64), table.shape), table
            )

    def relate_rows(self, coefficients: np.ndarray, ids: np.ndarray) -> None:
        """Record relations: rows of up to four coefficients and signed ids, or 0."""
        more = ((0, 0), (0, WIDTH - ids.shape[1]))
        self._relations.append((np.pad(coefficients, more), np.pad(ids, more)))

    def _rows(
        self, classes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Relations in terms of classes, four terms each; and those that are equations now."""
        coefficients, ids = map(np.concatenate, zip(*self._relations, strict=True))
        signed = classes[np.abs(ids)]
        if (ids < 0).any():
            signed = signed * np.sign(ids)
        coefficients, variables = coefficients * np.sign(signed), np.abs(signed)
        coefficients, variables = simplified(coefficients, variables)
        left, right, done = equations(coefficients, variables)
        return coefficients[~done], variables[~done], (left, right)

    def collapse(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Solve until no relation becomes an equation; classes, and relations left."""
        while True:
            classes = self.solve()
            if not self._relations:
                empty = np.zeros((0, WIDTH), np.int64)
                return classes, empty, empty
            first = representatives(classes)
            coefficients, variables, simple = self._rows(classes)
            # relations that are now equations are removed
            self._relations = [(coefficients, first[variables])]
            # while all relations are there, more equations are seen, which leave units that edges
            # of a skeleton can reach
            longest = WIDTH if len(variables) <= MAX_ELIMINATED else 2
            found = implied(coefficients, variables, longest)
            if not (len(simple[0]) or len(found[0])):
                return classes, coefficients, variables
            self._equate(first, simple)
            self._equate(first, found)

    def _equate(self, first: np.ndarray, pairs: tuple[np.ndarray, np.ndarray]) -> None:
        self.unify(*(torch.from_numpy(first[np.abs(side)] * np.sign(side)) for side in pairs))

    def resolve(self) -> Solution:
        """Solve all: base units, and derived classes as integer combinations of them."""
        while True:
            classes, coefficients, variables = self.collapse()
            total = int(np.abs(classes).max(initial=0))
            first = representatives(classes)
            solved: Rounds = []
            size = -1
            while size != len(variables):
                size = len(variables)
                for step in (multiples, peel, eliminate_shared):
                    rounds, coefficients, variables = step(coefficients, variables, total)
                    solved += rounds
                coefficients, variables = compress_relations(coefficients, variables, total)
            # substitution may give further equations
            found = [
                equations(coefficients, variables)[:2],
                implied(coefficients, variables, WIDTH),
            ]
            if any(len(left) for left, _ in found):
                for pairs in found:
                    self._equate(first, pairs)
                continue
            if (rest := _reduced(coefficients, variables, total)) is not None:
                known, high = _expressed([*solved, rest], total)
                if not len(high):
                    return _solution(classes, known)
                self.too_high += len(high)
                self._fix(first[high])
                continue
            # (of many relations, or of one such as ``3 a = 4 b``, fixing one variable is sound)
            uses = np.where(coefficients != 0, np.bincount(variables.reshape(-1))[variables], 0)
            often = np.take_along_axis(variables, uses.argmax(1)[:, None], 1)
            self._fix(first[np.unique(often)])

    def _fix(self, ids: np.ndarray) -> None:
        self.incomplete = True
        fixed = torch.from_numpy(ids)
        self.unify(fixed, torch.zeros_like(fixed))


def _reduced(
    coefficients: np.ndarray, variables: np.ndarray, total: int
) -> tuple[np.ndarray, csr_array] | None:
    """Later variables in terms of earlier ones, if whole numbers do it; ``None`` of many."""
    # (the last first: later ids are expressed by earlier ones)
    negative, column = np.unique(-variables, return_inverse=True)
    names = -negative
    if not len(names):
        return names, csr_array((0, total + 1), dtype=np.int64)
    if max(len(variables), len(names)) > MAX_DENSE:
        return None
    table = np.zeros((len(variables), len(names)), np.int64)
    column = column.reshape(variables.shape)
    np.add.at(table, (np.arange(len(variables))[:, None], column), coefficients)
    matrix, common, rank = fmpz_mat(table.tolist()).rref()
    entries = [divmod(-entry, common) for entry in matrix.entries()]
    if any(part or abs(whole) > LARGEST_POWER for whole, part in entries):
        return None
    whole = np.array([int(entry) for entry, _ in entries], np.int64)
    rows = whole.reshape(len(variables), len(names))[:rank]
    place = np.arange(rank), (rows != 0).argmax(1)
    rows[place] = 0
    return forms_of(names[place[1]], rows, np.broadcast_to(names, rows.shape), total)


def _expressed(peeled: Rounds, total: int) -> tuple[csr_array, np.ndarray]:
    """Every variable in terms of those without a form; and those of too high powers."""
    own = np.ones(total + 1, np.int64)
    own[0] = 0
    for pivots, _ in peeled:
        own[pivots] = 0
    shape = (total + 1, total + 1)
    known = csr_array(coo_array((own, (np.arange(total + 1), np.arange(total + 1))), shape=shape))
    for pivots, form in reversed(peeled):
        # both factors are below the limit, so float64 is exact enough to detect powers above it
        sizes = abs(form).astype(np.float64) @ abs(known).astype(np.float64)
        if sizes.nnz and sizes.max() > LARGEST_POWER:
            return known, pivots[np.unique(coo_array(sizes > LARGEST_POWER).row)]
        new = coo_array(form @ known)
        known = csr_array(
            known + csr_array(coo_array((new.data, (pivots[new.row], new.col)), shape=shape))
        )
    known.eliminate_zeros()
    return known, np.zeros(0, np.int64)


def _solution(classes: np.ndarray, known: csr_array) -> Solution:
    total = known.shape[0] - 1
    size = np.diff(known.indptr)
    base = (size == 1) & (known.diagonal() == 1)
    base[0] = False
    units = int(base.sum())
    number = np.zeros(total + 1, np.int64)
    number[base] = np.arange(1, units + 1)
    derived = ~base & (size > 0)
    derived[0] = False
    order = np.flatnonzero(derived)
    number[order] = units + 1 + np.arange(len(order))
    forms = csr_array(known[order])
    forms = csr_array(
        (forms.data, number[forms.indices] - 1, forms.indptr), shape=(len(order), units)
    )
    forms.sort_indices()
    return Solution(looked_up(number, classes), units, forms)
