"""Which units can be balanced: those with weights on both sides, so that the sum
of all sizes has a minimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from ..graph.spanning_tree import changes
from .pairs import MatrixLayout, Pairs

# distinct rows of a linear programme that is solved for products of scales
MOST_ROWS = 20_000
ROUNDS = 50
# a sum of changes that is not a rounding error of the programme
SMALL = 1e-6
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
    while groups := _one_way(pairs, result.free):
        result.groups |= groups
        result.fix(np.array(list(groups)), ONE_WAY)
    return result


def neighbours(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Which units have entering edges, and which leaving ones, whatever the weights are."""
    entering, leaving = (np.zeros(pairs.graph.expand.shape[0]) for _ in range(2))
    for block in pairs.graph.blocks:
        if not block.numel:
            continue
        layout = MatrixLayout(block.tail, block.head, block.shape)
        # (weights whose ends share a scale neither enter nor leave)
        shared, tail = layout.head - layout.side, layout.tail
        if block.unused is None:
            rows = (tail.min() != shared) | (tail.max() != shared)
            columns = (shared.min() != tail) | (shared.max() != tail)
        else:
            edges = layout.matrix(~block.unused.expand(block.shape), largest=True)
            edges &= shared[:, None] != tail
            rows, columns = edges.any(1), edges.any(0)
        for ids, into, against in (
            (layout.head[rows], entering, leaving),
            (layout.side[rows], leaving, entering),
            (tail[columns], leaving, entering),
        ):
            into[ids[ids > 0].numpy()], against[-ids[ids < 0].numpy()] = 1, 1
    entering, leaving = pairs.to_units(entering, leaving)
    return entering > 0, leaving > 0


def _strong(nodes: int, arcs: Iterable[np.ndarray]) -> np.ndarray:
    tail, head = np.concatenate([NONE, *arcs], 1)
    links = coo_array((np.ones(len(tail), bool), (tail, head)), shape=(nodes, nodes))
    label: np.ndarray = connected_components(links, directed=True, connection="strong")[1]
    return label.astype(np.int64)


def _one_way(pairs: Pairs, free: np.ndarray) -> dict[int, tuple[int, np.ndarray]]:
    """Groups that edges only enter (1) or only leave (-1), by one unit of each (from 0)."""
    count = len(free) + 1
    alive = np.zeros(pairs.graph.expand.shape[0], bool)
    alive[1:count] = free

    def node(ids: np.ndarray) -> np.ndarray:
        place = np.where(alive[np.abs(ids)], np.abs(ids), 0)
        return np.where((place > 0) & (ids < 0), place + count, place)

    def both(tail: np.ndarray, head: np.ndarray) -> np.ndarray:
        """Arcs from tails to heads and, of opposites, back; units that are not free are root."""
        return np.concatenate([[node(tail), node(head)], [node(-head), node(-tail)]], 1)

    # what a few arcs have joined needs no others, so that matrices are read twice
    # and hardly an arc is held
    label = _strong(2 * count, [both(*table.sample()) for table in pairs.tables])
    if not free.any() or (label[node(np.flatnonzero(free) + 1)] == label[0]).all():
        return {}
    arcs = [NONE]
    for table in pairs.whole():
        head, side, tail = (ids.numpy() for ids in (table.head, table.side, table.tail))
        far = label[node(side[:, None] + tail[None, :])]
        # (labels of mirror images differ where those do)
        apart = (table.sizes > 0).numpy() & (label[node(head)][:, None] != far)
        first, last = label[both(*table.arcs(*np.nonzero(apart)))]
        arcs.append(np.stack(np.divmod(np.unique(first * len(label) + last), len(label))))
    joined = _strong(int(label.max()) + 1, arcs)
    left, label = joined[np.concatenate(arcs, 1)], joined[label]
    plus, minus = label[1:count], label[count + 1 : 2 * count]
    leave, enter = (np.isin(plus, ends) for ends in left[:, left[0] != left[1]])
    wanted = free & (plus != label[0]) & (plus != minus) & ~(leave & enter)
    units = np.flatnonzero(wanted)
    # a group and its mirror image are one
    _, first = np.unique(np.minimum(plus, minus)[units], return_index=True)
    return {
        int(unit): (
            -1 if leave[unit] else 1,
            np.flatnonzero((plus == plus[unit]) | (minus == plus[unit])),
        )
        for unit in units[first]
    }


def _programmes(change: csr_array, result: Attained) -> None:
    """The same for products, whose terms can shrink together in directions of several units."""
    from scipy.optimize import linprog  # slow to import, and needed by networks with products only

    for _ in range(ROUNDS):
        free = np.flatnonzero(result.free)
        rows = csr_array(change[:, free])
        rows = csr_array(rows[np.flatnonzero(abs(rows).sum(1))])
        count = rows.shape[0]
        if not count:
            return
        none = np.zeros(count)
        # the direction along which most terms shrink, and none grows
        found = linprog(rows.sum(0), A_ub=rows, b_ub=none, bounds=(-1, 1), method="highs")
        if found.fun > -SMALL:
            return
        # keep the unit that it moves most
        size = np.abs(found.x)
        result.fix(free[[int(np.argmax(size >= size.max() * (1 - 1e-9)))]], ONE_WAY)
    result.fix(np.flatnonzero(result.free), ONE_WAY)
