"""The blocks of coordinates that one matrix may mix, and the group of that matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from .coordinates import Array, Demands, mixed


@dataclass(frozen=True)
class MixedBlock:
    """Coordinates that one matrix mixes.

    Attributes:
        group: ``"GL"``, ``"O"``, ``"O1"`` (orthogonal, keeps the vector of ones), ``"complex"``
            (invertible and complex linear), ``"unitary"``, ``"scales"`` (each coordinate has a
            factor of its own), or ``"rigid"``.
        classes: classes of coordinates, in the order of the matrix.
        partners: for complex groups, the row that each row is turned into.
        signs: the sign of each turn.
        reason: for a rigid block, ``(operation, module, line, why)``.
    """

    group: str
    classes: Array
    partners: Array | None = None
    signs: Array | None = None
    reason: tuple[str, str, str, str] = ("", "", "", "")

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for blocks of one group, size and turn (scales and rigid ones are alone)."""
        turn = () if self.partners is None else (*self.partners, *self.signs)  # type: ignore[misc]
        alone = id(self) if self.group in ("scales", "rigid") else 0
        return (self.group, len(self.classes), turn, alone)


class SolvedDemands:
    """The demands of a network, solved.

    Attributes:
        classes: the class of every coordinate.
        dual: whether a coordinate transforms by ``A^-T``.
        blocks: all blocks.
        gains: positions of the gains that bases may take in, in the numbering of all scalars.
    """

    def __init__(self, demands: Demands, also_used: Array) -> None:
        self.demands = demands
        self._edges = (
            np.concatenate(demands.edges, 1) if demands.edges else np.zeros((4, 0), np.int64)
        )
        count = demands.size
        left, right, _, gain = self._edges
        # positions of gains; edges have their numbers
        self.gains, numbers = np.unique(gain[gain >= 0], return_inverse=True)
        self._edges[3][gain >= 0] = numbers
        self._hashes = mixed(self.gains).view(np.int64)
        both = coo_array((np.ones(len(left), np.int8), (left, right)), shape=(count, count))
        self._number, self.classes = connected_components(both, directed=False)
        first = np.full(self._number, count)
        np.minimum.at(first, self.classes, np.arange(count))
        self._first = first
        self._grow_trees(left, right)
        self._orient()
        self._reference = first.copy()
        self._why = np.full(self._number, -1)
        self._orthogonal = np.zeros(self._number, bool)
        self._ones = np.zeros(self._number, bool)
        self._based = np.zeros(self._number, bool)
        for ids, reason in demands.fixed:
            self._fix(self.classes[ids], reason)
        self.powers = self._potentials(self._hashes)
        self._check_edges()
        self._check_ones_and_turns()
        self._check_gains(also_used)
        self.blocks = self._blocks()

    # -- trees, along which duality and gains add up

    def _grow_trees(self, left: Array, right: Array) -> None:
        count = self.demands.size
        rows = np.concatenate([left, np.full(self._number, count)])
        columns = np.concatenate([right, self._first])
        graph = coo_array(
            (np.ones(len(rows), np.int8), (rows, columns)), shape=(count + 1, count + 1)
        )
        _, before = breadth_first_order(graph.tocsr(), count, directed=False)
        self._before = np.where(before < 0, count, before)[: count + 1]
        self._before[count] = count
        low, high = np.minimum(left, right), np.maximum(left, right)
        keys = low.astype(np.int64) * (count + 1) + high
        order = np.argsort(keys, kind="stable")
        nodes = np.flatnonzero(self._before[:count] < count)
        parents = self._before[nodes]
        wanted = np.minimum(nodes, parents) * (count + 1) + np.maximum(nodes, parents)
        self._tree = np.full(count, -1)
        if len(nodes):
            self._tree[nodes] = order[np.searchsorted(keys[order], wanted)]

    def _along(self, own: Array) -> Array:
        """Sums of a number of each coordinate along the way from the first of its class."""
        total, before = np.append(own, np.zeros(1, own.dtype)), self._before.copy()
        with np.errstate(over="ignore"):
            while (before < len(own)).any():
                total = total + total[before]
                before = before[before]
        return total[:-1]

    def _orient(self) -> None:
        """Which coordinates are dual to the basis; of both choices the same in equal classes."""
        step = np.zeros(self.demands.size, np.int64)
        inner = self._tree >= 0
        step[inner] = self._edges[2][self._tree[inner]]
        dual = self._along(step) % 2 == 1
        marks, sums = self.demands.marks, []
        with np.errstate(over="ignore"):
            for turned in (False, True):
                own = np.zeros(self._number, np.uint64)
                np.add.at(
                    own, self.classes, mixed(marks ^ mixed((dual ^ turned).astype(np.uint64)))
                )
                sums.append(own)
        self.dual = dual ^ (sums[1] < sums[0])[self.classes]
        self._signature = np.stack([np.minimum(*sums), np.maximum(*sums)])

    def _potentials(self, gains: Array) -> Array:
        """Sums of gains along the trees: a coordinate is its gain times that of the basis."""
        step = np.zeros(self.demands.size, gains.dtype)
        inner = np.flatnonzero(self._tree >= 0)
        rows = self._tree[inner]
        with_gain = self._edges[3][rows] >= 0
        inner, rows = inner[with_gain], rows[with_gain]
        forward = self._edges[1][rows] == inner
        sign = np.where(self.dual[inner], -1, 1) * np.where(forward, 1, -1)
        step[inner] = sign * gains[self._edges[3][rows]]
        return self._along(step)

    def factors(self, gains: Array) -> Array:
        """How many times a coordinate is that of its basis, from the values of :attr:`gains`."""
        size = np.exp(self._relative(self._potentials(np.log(np.abs(gains)))))
        odd = self._relative(self._potentials((gains < 0).astype(np.int64))) % 2
        signed: Array = np.where(odd == 1, -size, size)
        return signed

    def powers_of_gains(self, coordinates: Array) -> coo_array:
        """Powers of :attr:`gains` whose product times the coordinate of the basis is a coordinate,
        shape ``(coordinates, gains)``: what :meth:`factors` evaluates.
        """
        found = [np.zeros((3, 0), np.int64)]
        references = self._reference[self.classes[coordinates]]
        for nodes, sign in ((coordinates, 1), (references, -1)):
            rows = np.arange(len(nodes))
            while len(rows := rows[self._tree[nodes] >= 0]):
                nodes = nodes[self._tree[nodes] >= 0]
                _, right, _, gain = self._edges[:, self._tree[nodes]]
                power = sign * np.where(self.dual[nodes], -1, 1) * np.where(right == nodes, 1, -1)
                found.append(np.stack([gain, rows, power])[:, gain >= 0])
                nodes = self._before[nodes]
        gain, rows, power = np.concatenate(found, 1)
        shape = (len(coordinates), len(self.gains))
        powers = coo_array((power, (rows, gain)), shape=shape)
        powers.sum_duplicates()
        return powers

    def gains_of(self, classes: Array) -> Array:
        """Positions of the gains between coordinates of these classes."""
        _, right, _, gain = self._edges
        own = (gain >= 0) & np.isin(self.classes[right], classes)
        found: Array = self.gains[np.unique(gain[own])]
        return found

    def _relative(self, potentials: Array) -> Array:
        relative: Array = potentials - potentials[self._reference][self.classes]
        return relative

    # -- checks

    def _fix(self, classes: Array, reason: int) -> None:
        new = classes[self._why[classes] < 0]
        self._why[new] = reason

    def _told(self, why: str) -> int:
        reasons = self.demands.reasons
        if ("", "", "", why) not in reasons:
            reasons.append(("", "", "", why))
        return reasons.index(("", "", "", why))

    def _base_at(self, nodes: Array, why: str) -> None:
        """Let the basis be that of these coordinates; a class with two bases is fixed."""
        classes = self.classes[nodes]
        new = ~self._based[classes]
        self._reference[classes[new]] = nodes[new]
        self._based[classes] = True
        other = self.powers[nodes] != self.powers[self._reference[classes]]
        self._fix(classes[other], self._told(why))

    def _check_edges(self) -> None:
        left, right, dual, gain = self._edges
        classes = self.classes[left]
        turned = (self.dual[left] ^ self.dual[right]) != (dual == 1)
        hashes = np.append(self._hashes, 0)
        with np.errstate(over="ignore"):
            step = np.where(self.dual[left], -1, 1) * hashes[gain]
            unequal = self.powers[right] - self.powers[left] != step
        why = "one coordinate meets itself through a gain that no weight can take in"
        self._fix(classes[unequal], self._told(why))
        self._orthogonal[classes[turned]] = True
        self._base_at(left[turned], "lengths are taken before and after a gain")

    def _check_ones_and_turns(self) -> None:
        if self.demands.ones:
            nodes = np.concatenate(self.demands.ones)
            self._base_at(nodes, "ones are added before or after a gain")
            classes = self.classes[nodes]
            self._ones[classes] = True
            self._fix(classes[~self._orthogonal[classes]], self._told("its mean is taken"))
        self._turn: dict[int, tuple[int, int]] = {}
        for left, right, sign in self.demands.turns:
            self._base_at(np.concatenate([left, right]), "a gain between turned pairs")
            for i, j, s in zip(self.classes[left], self.classes[right], sign, strict=True):
                if self._turn.setdefault(int(i), (int(j), int(s))) != (int(j), int(s)):
                    self._fix(np.array([i]), self._told("its coordinates are turned twice"))

    def _check_gains(self, also_used: Array) -> None:
        """A gain is folded wherever it is used, or nowhere."""
        _, right, _, gain = self._edges
        rows = gain >= 0
        gains, classes = gain[rows], self.classes[right[rows]]
        why = self._told("its gain has other uses")
        self._fix(classes[np.isin(self.gains[gains], also_used)], why)
        while len(gains):
            stuck = np.isin(gains, gains[self._why[classes] >= 0])
            if not (self._why[classes[stuck]] < 0).any():
                return
            self._fix(classes[stuck], why)

    # -- blocks

    def _blocks(self) -> list[MixedBlock]:
        free = np.flatnonzero(self._why < 0)
        _, which = np.unique(self._signature[:, free], axis=1, return_inverse=True)
        order = np.argsort(which.reshape(-1), kind="stable")
        parts = np.split(free[order], np.flatnonzero(np.diff(which.reshape(-1)[order])) + 1)
        single = np.array([part[0] for part in parts if len(part) == 1], np.int64)
        found = [self._block(np.sort(part)) for part in parts if len(part) > 1]
        bound = self._orthogonal[single] | np.isin(single, list(self._turn))
        if len(single[bound]):
            found.append(self._rigid(single[bound], "its length is taken"))
        if len(single[~bound]):
            found.append(MixedBlock("scales", single[~bound]))
        for reason in np.unique(self._why[self._why >= 0]).tolist():
            own = np.flatnonzero(self._why == reason)
            found.append(MixedBlock("rigid", own, reason=self.demands.reasons[reason]))
        return found

    def _block(self, classes: Array) -> MixedBlock:
        orthogonal, ones = self._orthogonal[classes], self._ones[classes]
        if orthogonal.any() != orthogonal.all() or ones.any() != ones.all():
            return self._rigid(classes, "lengths of some of its coordinates are taken")
        turned = [self._turn.get(int(one)) for one in classes]
        if any(turn is not None for turn in turned):
            return self._complex(classes, turned)
        least = 3 if ones[0] else 2
        if orthogonal[0] and len(classes) < least:
            return self._rigid(classes, "its length is taken")
        return MixedBlock("O1" if ones[0] else "O" if orthogonal[0] else "GL", classes)

    def _rigid(self, classes: Array, why: str) -> MixedBlock:
        return MixedBlock("rigid", classes, reason=("", "", "", why))

    def _complex(self, classes: Array, turned: list[tuple[int, int] | None]) -> MixedBlock:
        place = {int(one): number for number, one in enumerate(classes)}
        partners = np.array([-1 if turn is None else place.get(turn[0], -1) for turn in turned])
        signs = np.array([0 if turn is None else turn[1] for turn in turned])
        whole = (partners >= 0).all() and not self._ones[classes].any()
        again = whole and (partners[partners] == np.arange(len(classes))).all()
        if not again or (signs * signs[partners] != -1).any():
            return self._rigid(classes, "its coordinates are turned, but not in pairs")
        group = "unitary" if self._orthogonal[classes[0]] else "complex"
        return MixedBlock(group, classes, partners, signs)
