"""Which units can be balanced: those with weights on both sides, so that the sum
of all sizes has a minimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array, hstack
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from ..graph.parts import WeightBlock, idle
from ..graph.spanning_tree import changes
from .pairs import Pairs

# distinct rows of a linear programme that is solved for products of scales
MOST_ROWS = 20_000
ROUNDS = 50
# scalars of a tensor whose ends are compared at once
AT_ONCE = 1 << 20
NONE = np.zeros((2, 0), np.int64)

NOTHING_LEAVES = "no weight leaves it (a normalisation follows): the smaller, the better"
NOTHING_ENTERS = "no weight enters it: the larger, the better"
ZEROS_LEAVE = "all weights that leave it are zero: the smaller, the better"
ZEROS_ENTER = "all weights that enter it are zero: the larger, the better"
ALL_ZERO = "all weights at it are zero"
ONE_WAY = (
    "no closed walk through the root passes it: its group has no minimum of its own, and one unit"
    " is kept"
)
PRODUCT = (
    "a factor of a product, in a network with too many pairs of units to tell whether there is a"
    " minimum"
)


@dataclass
class Attained:
    """Which units may change (``free``), and ``reasons`` why the others (from 1) may not.

    ``groups`` has, for a unit that was kept (from 0), 1 if edges only enter its group or -1 if
    they only leave it, and the units of the group.
    """

    free: np.ndarray
    reasons: dict[str, np.ndarray] = field(default_factory=dict)
    groups: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)

    def fix(self, units: np.ndarray, reason: str) -> None:
        """Keep the scale of some units (counted from 0)."""
        units = np.unique(units[self.free[units]])
        if len(units):
            self.free[units] = False
            old = self.reasons.get(reason, np.zeros(0, np.int64))
            self.reasons[reason] = np.union1d(old, units + 1)


def attained(pairs: Pairs, kept: Mapping[str, np.ndarray] | None = None) -> Attained:
    """Fix as few units as possible, so that the other units have a minimum.

    ``sum_e c_e exp((A phi)_e)`` has a minimum exactly if no direction makes some terms smaller and
    none larger. A unit at which all terms have one sign is such a direction by itself. The others
    are found as closed walks: an edge whose ends do not reach each other can shrink for nothing.
    Each round keeps one unit of every group that only enters or only leaves. Opposite scales are
    followed on a doubled graph, products by linear programmes.
    """
    graph = pairs.graph
    result = Attained(np.ones(graph.num_units, bool))
    for reason, units in (kept or {}).items():
        result.fix(units, reason)
    entering, leaving, _ = pairs.sides(np.zeros(graph.num_units))
    if ((entering == 0) | (leaving == 0)).any():
        enters, leaves = neighbours(pairs)
        for mask, reason in (
            ((entering == 0) & (leaving == 0), ALL_ZERO),
            ((leaving == 0) & ~leaves, NOTHING_LEAVES),
            ((entering == 0) & ~enters, NOTHING_ENTERS),
            (leaving == 0, ZEROS_LEAVE),
            (entering == 0, ZEROS_ENTER),
        ):
            result.fix(np.flatnonzero(mask), reason)
    if graph.forms.shape[0]:
        if (ends := pairs.ends(MOST_ROWS)) is not None:
            _programmes(csr_array(changes(graph, *ends)[:, 1:]), result)
            return result
        result.fix(np.flatnonzero(np.asarray(abs(graph.forms).sum(0)).reshape(-1)), PRODUCT)
    while True:
        groups = _one_way(pairs, result.free)
        if not groups:
            return result
        result.groups |= groups
        result.fix(np.array(list(groups)), ONE_WAY)


def neighbours(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Which units have entering edges, and which leaving ones, whatever the weights are."""
    entering, leaving = (np.zeros(pairs.graph.expand.shape[0]) for _ in range(2))
    for head, tail in (ends for block in pairs.graph.blocks for ends in _ends(block)):
        for ids, into, against in ((head, entering, leaving), (tail, leaving, entering)):
            found = ids.unique().numpy()
            into[found[found > 0]], against[-found[found < 0]] = 1, 1
    entering, leaving = pairs.to_units(entering, leaving)
    return entering > 0, leaving > 0


def _ends(block: WeightBlock) -> Iterator[tuple[Tensor, Tensor]]:
    """Heads and tails that occur among a tensor's edges, a few rows at a time."""
    loops = bool(torch.isin(block.head.reshape(-1), block.tail.reshape(-1)).any())
    if block.unused is None and not loops and block.head.shape != block.tail.shape:
        yield block.head, block.tail
        return
    rows = block.shape[0] if block.shape else 1
    step = max(1, AT_ONCE * rows // max(block.numel, 1))
    for start in range(0, rows, step):
        place = slice(start, start + step)
        head, tail, unused = (
            ids[place] if ids.dim() and ids.shape[0] > 1 else ids
            for ids in (block.head, block.tail, idle(block))
        )
        # (weights whose ends share a scale neither enter nor leave)
        head, tail, kept = torch.broadcast_tensors(head, tail, (head != tail) & ~unused)
        yield head[kept], tail[kept]


class _Arcs:
    """Arcs from tails to heads and, of opposites, back; units that are not free are root."""

    def __init__(self, pairs: Pairs, free: np.ndarray) -> None:
        self.pairs, self.count = pairs, len(free) + 1
        self._alive = np.concatenate(
            [[False], free, np.zeros(pairs.graph.expand.shape[0] - self.count, bool)]
        )

    def node(self, ids: np.ndarray) -> np.ndarray:
        place = np.where(self._alive[np.abs(ids)], np.abs(ids), 0)
        return np.where((place > 0) & (ids < 0), place + self.count, place)

    def both(self, tail: np.ndarray, head: np.ndarray) -> np.ndarray:
        arcs = [
            np.stack([self.node(sign * ids) for ids in (tail, head)[::sign]]) for sign in (1, -1)
        ]
        return np.concatenate(arcs, 1)

    def sample(self) -> Iterator[np.ndarray]:
        """One arc for every row and column, which join most of what all would join."""
        for table in self.pairs.tables:
            yield self.both(*table.sample())

    def across(self, label: np.ndarray) -> Iterator[np.ndarray]:
        """Arcs between nodes of different labels, as labels and without repetition."""
        for table in self.pairs.whole():
            head, side, tail = (ids.numpy() for ids in (table.head, table.side, table.tail))
            far = label[self.node(side[:, None] + tail[None, :])]
            # (labels of mirror images differ where those do)
            apart = (table.sizes > 0).numpy() & (label[self.node(head)][:, None] != far)
            first, last = label[self.both(*table.arcs(*np.nonzero(apart)))]
            yield np.stack(np.divmod(np.unique(first * len(label) + last), len(label)))


def _strong(nodes: int, arcs: np.ndarray) -> np.ndarray:
    links = coo_array((np.ones(arcs.shape[1], bool), (arcs[0], arcs[1])), shape=(nodes, nodes))
    label: np.ndarray = connected_components(links, directed=True, connection="strong")[1]
    return label.astype(np.int64)


def _one_way(pairs: Pairs, free: np.ndarray) -> dict[int, tuple[int, np.ndarray]]:
    """Groups that edges only enter (1) or only leave (-1), by one unit of each (from 0)."""
    arcs, count = _Arcs(pairs, free), len(free) + 1
    # what a few arcs have joined needs no others, so that matrices are read twice
    # and hardly an arc is held
    label = _strong(2 * count, np.concatenate([NONE, *arcs.sample()], 1))
    if not free.any() or (label[arcs.node(np.flatnonzero(free) + 1)] == label[0]).all():
        return {}
    left = np.concatenate([NONE, *arcs.across(label)], 1)
    joined = _strong(int(label.max()) + 1, left)
    left, label = joined[left], joined[label]
    left = left[:, left[0] != left[1]]
    closed = np.ones((2, int(label.max()) + 1), bool)
    closed[0, left[0]] = False
    closed[1, left[1]] = False
    plus, minus = label[1:count], label[count + 1 : 2 * count]
    wanted = free & (plus != label[0]) & (plus != minus) & (closed[0] | closed[1])[plus]
    units = np.flatnonzero(wanted)
    # a group and its mirror image are one
    _, first = np.unique(np.minimum(plus, minus)[units], return_index=True)
    return {
        int(unit): (
            1 if closed[0, plus[unit]] else -1,
            np.flatnonzero((plus == plus[unit]) | (minus == plus[unit])),
        )
        for unit in units[first]
    }


def _programmes(change: csr_array, result: Attained) -> None:
    """The same for products: terms that no non-negative combination brings back."""
    from scipy.optimize import linprog  # slow to import, and needed by networks with products only

    for _ in range(ROUNDS):
        rows = csr_array(change[:, np.flatnonzero(result.free)])
        rows.eliminate_zeros()
        rows = csr_array(rows[np.flatnonzero(np.diff(rows.indptr))])
        count = rows.shape[0]
        if not count:
            return
        turned = csr_array(rows.T.astype(np.float64))
        equations = hstack([turned, turned]).tocsr()
        found = linprog(
            np.concatenate([-np.ones(count), np.zeros(count)]),
            A_eq=equations,
            b_eq=np.zeros(equations.shape[0]),
            bounds=[(0, 1)] * count + [(0, None)] * count,
            method="highs",
        )
        lost = found.x[:count] < 0.5
        if not lost.any():
            return
        # the dual solution is a direction along which all these terms shrink: keep
        # the unit that it moves most
        size = np.abs(found.eqlin.marginals)
        result.fix(
            np.flatnonzero(result.free)[[int(np.argmax(size >= size.max() * (1 - 1e-9)))]], ONE_WAY
        )
    result.fix(np.flatnonzero(result.free), ONE_WAY)
