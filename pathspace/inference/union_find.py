"""Signed union-find: equations between signed ids, solved by the connected
components of a doubled graph.

Every id denotes the logarithm of a positive scale, ``-k`` the negative of this logarithm, and
``0`` (the root) a fixed scale. If ``+k`` and ``-k`` are in one component, then ``phi(k) =
-phi(k)``, so the scale is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import prod
from typing import Self

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from .values import NEUTRAL, ROOT, distinct, distinct_together, has_zeros

# both sides of equations
Pairs = tuple[np.ndarray, np.ndarray]
# number of equations that are solved together, which need about a hundred bytes each
AT_ONCE = 1 << 20
# of more equations at once, each is kept once
MOST_REPEATED = 1 << 18


class UnionFind:
    """Equations between signed ids, solved by connected components.

    Example:
        >>> import torch
        >>> scales = UnionFind()
        >>> a, b = scales.fresh((2,)), scales.fresh((2,))
        >>> _ = scales.unify(a[:1], -b[:1]), scales.unify(a[1:], -a[1:])
        >>> scales.solve().tolist()  # a0, a1 (pinned), b0 = -a0, b1
        [0, 1, 0, -1, 2]
    """

    def __init__(self) -> None:
        self.size = 1
        # signed classes of the last solution, and the equations added since
        self._solved = np.zeros(1, np.int64)
        self._pairs: list[Pairs] = []
        self._pending = 0

    def fresh(self, shape: Sequence[int]) -> Tensor:
        """New ids, all different."""
        count = prod(shape)
        ids = torch.arange(self.size, self.size + count).reshape(tuple(shape))
        self.size += count
        return ids

    def copy(self) -> Self:
        """A copy to which other equations can be added."""
        twin = copy(self)
        lists = {name: [*held] for name, held in vars(self).items() if isinstance(held, list)}
        vars(twin).update(lists)
        return twin

    def unify(self, left: Tensor, right: Tensor) -> Pairs | None:
        """Record ``phi(left) = phi(right)`` elementwise; both sides of what is recorded."""
        left, right = distinct_together(left, right)
        if (both := self._star(left, right)) is not None:
            found = [pairs for sides in both if (pairs := self.unify(*sides)) is not None]
            return _concatenated(found) if found else None
        # (numpy is quicker on few numbers)
        one, other = left.numpy(), right.numpy()
        keep = (one != other) & (one != NEUTRAL) & (other != NEUTRAL)
        pairs = one[keep], other[keep]
        if len(pairs[0]) > MOST_REPEATED and self.size < 2**31:
            # unique numbers, each made of both ids, are found much faster than unique columns
            key = torch.unique(torch.from_numpy(pairs[0] * 2**32 + (pairs[1] + 2**31))).numpy()
            pairs = key >> 32, (key & (2**32 - 1)) - 2**31
        if not len(pairs[0]):
            return None
        self._pairs.append(pairs)
        self._pending += len(pairs[0])
        if self._pending > max(AT_ONCE, self.size // 4):
            self.solve()
        return pairs

    def _star(
        self, left: Tensor, right: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """Two smaller unifications, of the first id of each set, in place of all pairs."""
        dims = range(left.dim())
        own = [dim for dim in dims if left.shape[dim] > 1 and right.stride(dim) == 0]
        other = [dim for dim in dims if left.shape[dim] > 1 and left.stride(dim) == 0]
        if not own or not other:
            return None
        few, many = distinct(left), distinct(right)
        # (exact zeros impose nothing, so they cannot represent other ids)
        if has_zeros(few) or has_zeros(many):
            return None
        for dim in own:
            few = few.narrow(dim, 0, 1)
        for dim in other:
            many = many.narrow(dim, 0, 1)
        return (few, right), (left, many)

    def present(self, ids: Tensor) -> Tensor:
        """The ids that occur, without their signs and mostly without repetitions."""
        few = distinct(ids)
        # in their order in memory, so that nothing is copied
        flat = few.permute(sorted(range(few.dim()), key=few.stride, reverse=True)).reshape(-1)
        return class_index(flat)

    def solve(self) -> np.ndarray:
        """The signed class of every id, 0 for the root's, +-1, +-2, ... for the others."""
        known = _largest(self._solved)
        old = np.concatenate(
            [self._solved, np.arange(known + 1, known + 1 + self.size - len(self._solved))]
        )
        if self._pairs:
            left, right = _concatenated(self._pairs)
            for start in range(0, len(left), AT_ONCE):
                some = slice(start, start + AT_ONCE)
                one, other = looked_up(old, left[some]), looked_up(old, right[some])
                old = looked_up(components(one, other, _largest(old) + 1), old)
            self._pairs, self._pending = [], 0
        self._solved = old
        return old


def looked_up(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """``table[|ids|] * sign(ids)``."""
    if not ids.size or ids.min() >= 0:
        return np.asarray(table[ids], np.int64)
    return np.asarray(table[np.abs(ids)] * np.sign(ids))


def _largest(ids: np.ndarray) -> int:
    return max(int(ids.max()), -int(ids.min()))


def _concatenated(pairs: list[Pairs]) -> Pairs:
    left, right = zip(*pairs, strict=True)
    return np.concatenate(left), np.concatenate(right)


def components(left: np.ndarray, right: np.ndarray, size: int) -> np.ndarray:
    """Signed class of each of ``size`` ids under the equations ``left = right``; 0 is the root."""
    # (components are numbered in order of first appearance)
    if not (left < 0).any() and not (right < 0).any():
        matrix = coo_array((np.ones(len(left), bool), (left, right)), shape=(size, size))
        return np.asarray(connected_components(matrix, directed=False)[1], np.int64)

    def node(ids: np.ndarray) -> np.ndarray:
        return np.where(ids < 0, -2 * ids + 1, 2 * ids)

    ends = (
        np.concatenate([node(left), node(-left), [0]]),
        np.concatenate([node(right), node(-right), [1]]),
    )
    matrix = coo_array((np.ones(len(ends[0]), bool), ends), shape=(2 * size, 2 * size))
    label = connected_components(matrix, directed=False)[1]
    plus, minus = label[0::2], label[1::2]
    first = np.where(plus == minus, 0, np.minimum(plus, minus))
    met = np.zeros(2 * size, bool)
    met[first] = True
    number = (np.cumsum(met) - 1)[first]
    return np.asarray(np.where(plus <= minus, number, -number), np.int64)


def representatives(classes: np.ndarray) -> np.ndarray:
    """The first raw id of each class, with the sign that gives the class itself."""
    first = np.zeros(1 + max(int(classes.max()), -int(classes.min())), np.int64)
    # (the last of several values written to one position remains, so the order is reversed)
    first[np.abs(classes[::-1])] = np.arange(len(classes) - 1, -1, -1)
    first[0] = 0
    result: np.ndarray = first * np.sign(classes[first])
    return result


def negated(ids: Tensor) -> Tensor:
    """Opposite scales; exact zeros are unchanged."""
    return torch.where(ids == NEUTRAL, ids, -ids)


def class_index(ids: Tensor) -> Tensor:
    """Index of ids of either sign in a table; exact zeros have the index of the root."""
    numbers = ids.numpy()
    return torch.from_numpy(np.where(numbers == NEUTRAL, ROOT, np.abs(numbers)))


def lookup(classes: Tensor, ids: Tensor) -> Tensor:
    """Signed classes of raw ids; exact zeros (unused scalars) have the class of the root."""
    numbers = ids.numpy()
    known = looked_up(classes.numpy(), np.where(numbers == NEUTRAL, ROOT, numbers))
    return torch.from_numpy(np.asarray(known))
