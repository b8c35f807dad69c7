"""Coordinates of feature spaces, and what an operation demands of them.

Every position along a dimension of a parameter is a *coordinate* of a space. A change of basis
multiplies the coordinates of a block by one matrix ``A``: those that write it by ``A``, those that
read it (their duals) by ``A^-T``. Operations demand that coordinates are equal, perhaps up to a
gain; that only some of them are mixed (marks); that ``A`` is orthogonal, keeps the vector of ones,
or commutes with a turn of pairs; or that a coordinate is not changed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..inference.values import NEUTRAL, ROOT, broadcast_shape, distinct

# ids from here on stand for products of two coordinates
PAIRS = 2**40
Array = np.ndarray


def mixed(numbers: Array) -> Array:
    """Well-mixed 64-bit numbers, the same in every process."""
    with np.errstate(over="ignore"):
        numbers = (numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result: Array = numbers ^ (numbers >> np.uint64(31))
    return result


def is_coordinate(ids: Tensor) -> Tensor:
    """Which ids are coordinates: neither constants, nor zeros, nor products."""
    return (ids > ROOT) & (ids < PAIRS)


@dataclass
class Demands:
    """All demands of a network.

    Attributes:
        size: number of ids.
        edges: rows of (coordinate, coordinate, whether the second is the dual of the first,
            position of the gain ``g`` in ``second = g first``, or -1).
        ones: coordinates along which ones are added or summed.
        turns: rows of (coordinate, coordinate, sign): the first is turned into ``sign`` times
            the second.
        fixed: coordinates that cannot change, with the number of the reason.
        reasons: why coordinates are fixed.
    """

    size: int = 1
    edges: list[Array] = field(default_factory=list)
    ones: list[Array] = field(default_factory=list)
    turns: list[Array] = field(default_factory=list)
    fixed: list[tuple[Array, int]] = field(default_factory=list)
    reasons: list[tuple[str, str, str, str]] = field(default_factory=list)
    _marks: Array = field(default_factory=lambda: np.zeros(1024, np.uint64))
    _events: int = 0
    _products: list[tuple[Array, Array]] = field(default_factory=list)
    _count: int = 0

    def fresh(self, shape: Sequence[int]) -> Tensor:
        """New coordinates of one space, all different."""
        count = prod(shape)
        start, self.size = self.size, self.size + count
        if self.size > len(self._marks):
            wider = np.zeros(2 * self.size, np.uint64)
            wider[:start] = self._marks[:start]
            self._marks = wider
        self._events += 1
        self._marks[start : self.size] = mixed(np.full(1, self._events, np.uint64))[0]
        return torch.arange(start, self.size).reshape(tuple(shape))

    @property
    def marks(self) -> Array:
        """A number for each coordinate: only those with equal numbers may be mixed."""
        return self._marks[: self.size]

    def marks_with_neighbours(self) -> Array:
        """Marks that also tell the marks of equal and dual coordinates, two steps away."""
        marks = self.marks.copy()
        if not self.edges:
            return marks
        left, right, dual, gain = np.concatenate(self.edges, 1)
        kind = (2 * dual + (gain >= 0)).astype(np.uint64)
        with np.errstate(over="ignore"):
            for _ in range(2):
                seen = np.zeros_like(marks)
                np.add.at(seen, left, mixed(marks[right] ^ mixed(4 + kind)))
                np.add.at(seen, right, mixed(marks[left] ^ mixed(kind)))
                marks = mixed(marks ^ mixed(seen))
        return marks

    def mark(self, ids: Tensor, labels: Tensor | None = None) -> None:
        """Let only coordinates be mixed that occur equally often under the same labels."""
        small = distinct(ids)
        self._events += 1
        if labels is None:
            labels = torch.zeros((), dtype=torch.long)
        flat = small.reshape(-1).numpy()
        names = labels.expand(small.shape).reshape(-1).numpy()
        keep = (flat > ROOT) & (flat < PAIRS)
        if not keep.any():
            return
        with np.errstate(over="ignore"):
            event = mixed(np.full(1, self._events, np.uint64))[0]
            weights = mixed(names[keep].astype(np.uint64) ^ event)
            found, inverse = np.unique(flat[keep], return_inverse=True)
            sums = np.zeros(len(found), np.uint64)
            np.add.at(sums, inverse, weights)
            self._marks[found] = mixed(self._marks[found] ^ mixed(sums))

    def unify(self, left: Tensor, right: Tensor, dual: bool = False) -> None:
        """Let coordinates be equal elementwise, or dual to each other; zeros demand nothing.

        A coordinate that is its own dual is one of an orthonormal basis.
        """
        _, left, right = _one_of_each(left, right)
        one, other = left.reshape(-1).numpy(), right.reshape(-1).numpy()
        keep = (one != NEUTRAL) & (other != NEUTRAL) & ((one != other) | dual)
        if keep.any():
            rows = np.unique(np.stack([one[keep], other[keep]]), axis=1)
            self._add(rows[0], rows[1], dual, np.full(rows.shape[1], -1))

    def gained(self, ids: Array, gains: Array) -> Tensor:
        """New coordinates, each a gain times another one."""
        new = self.fresh((len(ids),))
        self._add(ids, new.numpy(), False, gains)
        return new

    def _add(self, left: Array, right: Array, dual: bool, gains: Array) -> None:
        self.edges.append(np.stack([left, right, np.full(len(left), dual), gains]))

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        """Ids of products of two coordinates."""
        full, left, right = _one_of_each(left, right)
        start = PAIRS + self._count
        self._products.append((left.reshape(-1).numpy(), right.reshape(-1).numpy()))
        self._count += left.numel()
        return torch.arange(start, PAIRS + self._count).reshape(left.shape).expand(full)

    def factors(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Both coordinates of products; ``ROOT`` where an id is none."""
        flat = ids.reshape(-1).numpy()
        found = np.zeros((2, flat.size), np.int64)
        where = np.flatnonzero((flat >= PAIRS) & (flat != NEUTRAL))
        if len(where):
            tables = [np.concatenate([batch[side] for batch in self._products]) for side in (0, 1)]
            for side in (0, 1):
                found[side, where] = tables[side][flat[where] - PAIRS]
        left, right = (torch.from_numpy(row).reshape(ids.shape) for row in found)
        return left, right

    def members(self, ids: Tensor) -> Array:
        """The coordinates that occur, those in products among them."""
        small = distinct(ids)
        flat = np.unique(small.reshape(-1).numpy())
        own = flat[(flat > ROOT) & (flat < PAIRS)]
        if (flat >= PAIRS).any():
            inside = [part.numpy().reshape(-1) for part in self.factors(small)]
            own = np.unique(np.concatenate([own, *inside]))
        return own[(own > ROOT) & (own < PAIRS)]

    def fix(self, ids: Tensor, reason: tuple[str, str, str, str]) -> None:
        """Let coordinates never change, because of ``(operation, module, line, why)``."""
        found = self.members(ids)
        if len(found):
            if not self.reasons or self.reasons[-1] != reason:
                self.reasons.append(reason)
            self.fixed.append((found, len(self.reasons) - 1))


def _one_of_each(left: Tensor, right: Tensor) -> tuple[torch.Size, Tensor, Tensor]:
    """The common shape, and both tensors with size 1 where neither varies."""
    shape = broadcast_shape(left.shape, right.shape)
    left, right = left.expand(shape), right.expand(shape)
    for dim, size in enumerate(shape):
        if size > 1 and not left.stride(dim) and not right.stride(dim):
            left, right = left.narrow(dim, 0, 1), right.narrow(dim, 0, 1)
    return shape, left, right
