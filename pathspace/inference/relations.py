"""Scales that are sums of scales: products of activations, and matrices reused in depth.

Besides equations between two ids, operations impose relations with more terms: the product of two activations has
``phi(out) = phi(a) + phi(b)``, and a matrix used twice demands ``phi(head') - phi(head) = phi(tail') - phi(tail) = c``
with one number ``c`` for the whole matrix. Most of them collapse once the equations are solved (an operand turns out to
be the root, ``c`` turns out to be 0). What remains is eliminated exactly over the integers: some ids become *derived*,
integer combinations of base units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from torch import Tensor

from pathspace.inference.units import UnionFind
from pathspace.inference.values import NEUTRAL

MAX_ELIMINATED = 200_000


@dataclass(frozen=True)
class Solution:
    """Every id in terms of base units.

    Attributes:
        classes: signed class of every raw id: 0 the root, ``1..units`` base units, above that derived classes.
        units: number of base units.
        forms: integer matrix ``(derived, units)``: class ``units + 1 + i`` has log-scale ``forms[i] @ phi``.
    """

    classes: np.ndarray
    units: int
    forms: csr_array


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

    def relate(self, *terms: tuple[int, Tensor]) -> None:
        """Record ``sum of coefficient * phi(ids) = 0`` elementwise, after broadcasting; exact zeros impose nothing.

        Args:
            *terms: up to four pairs (coefficient, ids).
        """
        ids = torch.broadcast_tensors(*(entry for _, entry in terms))
        for dim in range(ids[0].dim()):
            if ids[0].shape[dim] > 1 and all(entry.stride(dim) == 0 for entry in ids):
                ids = tuple(entry.narrow(dim, 0, 1) for entry in ids)
        table = torch.stack([entry.reshape(-1) for entry in ids], 1)
        table = table[(table != NEUTRAL).all(1)]
        if len(table) > 4096:
            table = torch.unique(table, dim=0)
        if len(table):
            coefficients = np.broadcast_to(np.array([c for c, _ in terms], np.int64), table.shape)
            self._relations.append((coefficients, table.numpy()))

    @property
    def related(self) -> bool:
        """Whether any relation was recorded."""
        return bool(self._relations)

    def _rows(self, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Relations in terms of classes: coefficients and classes, four columns, like terms combined, 0 where empty."""
        width = 4
        parts = [(np.zeros((0, width), np.int64), np.zeros((0, width), np.int64))]
        for coefficients, ids in self._relations:
            signed = classes[np.abs(ids)] * np.sign(ids)
            pad = ((0, 0), (0, width - ids.shape[1]))
            parts.append((np.pad(coefficients * np.sign(signed), pad), np.pad(np.abs(signed), pad)))
        return _combined(np.concatenate([c for c, _ in parts]), np.concatenate([v for _, v in parts]))

    def collapse(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Solve equations and feed back every relation that has become one, until nothing changes.

        Returns:
            Signed classes of all ids, and the remaining relations (coefficients, classes).
        """
        while True:
            classes = self.solve()
            if not self._relations:
                empty = np.zeros((0, 4), np.int64)
                return classes, empty, empty
            coefficients, variables = self._rows(classes)
            count = (coefficients != 0).sum(1)
            first = np.concatenate([[0], _representatives(classes)])
            single = count == 1
            equal = (count == 2) & (np.abs(coefficients[:, 0]) == np.abs(coefficients[:, 1]))
            if not (single.any() or equal.any()):
                return classes, coefficients[count > 1], variables[count > 1]
            zero = torch.from_numpy(first[variables[single, 0]])
            self.unify(zero, torch.zeros_like(zero))
            left, right = (torch.from_numpy(first[variables[equal, i]]) for i in (0, 1))
            self.unify(left, right * torch.from_numpy(-np.sign(coefficients[equal, 0] * coefficients[equal, 1])))

    def resolve(self) -> Solution:
        """Solve everything: base units, and derived classes as integer combinations of them."""
        while True:
            classes, coefficients, variables = self.collapse()
            total = int(np.abs(classes).max(initial=0))
            rows = [
                {int(v): int(c) for c, v in zip(row, names, strict=True) if c}
                for row, names in zip(coefficients[:MAX_ELIMINATED], variables[:MAX_ELIMINATED], strict=True)
            ]
            defined, stuck = _eliminate(rows)
            # sound where exactness would cost too much: fix what remains
            for row in variables[MAX_ELIMINATED:].tolist():
                stuck |= {variable for variable in row if variable}
            if not stuck:
                return _solution(classes, total, defined)
            first = np.concatenate([[0], _representatives(classes)])
            fixed = torch.from_numpy(first[np.array(sorted(stuck))])
            self.unify(fixed, torch.zeros_like(fixed))


def _representatives(classes: np.ndarray) -> np.ndarray:
    """One raw id of each class 1, 2, ..., with the sign that makes it the class itself."""
    values, first = np.unique(np.abs(classes), return_index=True)
    first = first[values > 0]
    return first * np.sign(classes[first])


def _combined(coefficients: np.ndarray, variables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Combine like terms, divide by common factors, drop duplicates."""
    if len(variables) == 0:
        return coefficients, variables
    variables = np.where(coefficients == 0, 0, variables)
    order = np.argsort(-variables, 1, kind="stable")
    variables, coefficients = (np.take_along_axis(array, order, 1) for array in (variables, coefficients))
    for i in range(variables.shape[1] - 1, 0, -1):
        same = variables[:, i] == variables[:, i - 1]
        coefficients[:, i - 1] += np.where(same, coefficients[:, i], 0)
        coefficients[:, i] = np.where(same, 0, coefficients[:, i])
    coefficients = np.where(variables == 0, 0, coefficients)
    # non-zero terms first
    order = np.argsort(coefficients == 0, 1, kind="stable")
    variables, coefficients = (np.take_along_axis(array, order, 1) for array in (variables, coefficients))
    variables = np.where(coefficients == 0, 0, variables)
    factor = np.gcd.reduce(coefficients, axis=1)
    factor = np.where(coefficients[:, 0] < 0, -1, 1) * np.where(factor == 0, 1, factor)
    coefficients = coefficients // factor[:, None]
    kept = np.unique(np.concatenate([coefficients, variables], 1), axis=0)
    width = variables.shape[1]
    kept = kept[kept[:, 0] != 0]
    return kept[:, :width].copy(), kept[:, width:].copy()


def _eliminate(rows: Sequence[dict[int, int]]) -> tuple[dict[int, dict[int, int]], set[int]]:
    """Exact elimination with unit pivots, sparsest rows and rarest variables first.

    Returns:
        Derived variable -> its combination of others (fully substituted), and variables that no unit pivot can express.
    """
    pending = [dict(row) for row in rows]
    where: dict[int, set[int]] = {}
    for i, row in enumerate(pending):
        for variable in row:
            where.setdefault(variable, set()).add(i)
    defined: dict[int, dict[int, int]] = {}
    queue = sorted(range(len(pending)), key=lambda i: len(pending[i]))
    stuck: set[int] = set()
    for i in queue:
        row = pending[i]
        if not row:
            continue
        common = gcd(*row.values())
        candidates = [v for v, c in row.items() if abs(c) == common]
        if not candidates:
            stuck |= set(row)
            continue
        pivot = min(candidates, key=lambda v: (len(where[v]), -v))
        sign = row[pivot] // common
        form = {v: -sign * c // common for v, c in row.items() if v != pivot}
        for j in list(where[pivot]):
            target = pending[j]
            factor = target.pop(pivot, 0)
            for v, c in form.items():
                value = target.get(v, 0) + factor * c
                if value:
                    target[v] = value
                    where.setdefault(v, set()).add(j)
                else:
                    target.pop(v, None)
        pending[i] = {}
        defined[pivot] = form
    # substitute backwards: a form may mention variables that were eliminated later
    for pivot in reversed(list(defined)):
        full: dict[int, int] = {}
        for v, c in defined[pivot].items():
            for u, d in defined[v].items() if v in defined else ((v, 1),):
                full[u] = full.get(u, 0) + c * d
        defined[pivot] = {v: c for v, c in full.items() if c}
    return defined, stuck


def _solution(classes: np.ndarray, total: int, defined: dict[int, dict[int, int]]) -> Solution:
    """Number base units first and derived classes after them."""
    derived = np.zeros(total + 1, bool)
    derived[list(defined)] = True
    zero = np.array([v for v, form in defined.items() if not form], np.int64)
    base = ~derived
    base[0] = False
    units = int(base.sum())
    number = np.zeros(total + 1, np.int64)
    number[base] = np.arange(1, units + 1)
    order = [v for v in sorted(defined) if defined[v]]
    number[order] = units + 1 + np.arange(len(order))
    number[zero] = 0
    entries = [(i, number[u] - 1, c) for i, v in enumerate(order) for u, c in defined[v].items()]
    rows, columns, values = (np.array([entry[k] for entry in entries], np.int64) for k in range(3))
    forms = coo_array((values, (rows, columns)), shape=(len(order), units)).tocsr()
    return Solution(number[np.abs(classes)] * np.sign(classes), units, csr_array(forms))
