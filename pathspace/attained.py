"""Which units can be balanced: those whose scale the sum of all sizes holds on both sides."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array, hstack
from scipy.sparse.csgraph import connected_components

from pathspace.pairs import Pairs
from pathspace.structure import Structure

# distinct rows of a linear programme that is solved for products of scales
MOST_ROWS = 20_000
ROUNDS = 50

NOTHING_LEAVES = "no weight leaves it (a normalisation follows): the smaller, the better"
NOTHING_ENTERS = "no weight enters it: the larger, the better"
ZEROS_LEAVE = "all weights that leave it are zero: the smaller, the better"
ZEROS_ENTER = "all weights that enter it are zero: the larger, the better"
ALL_ZERO = "all weights at it are zero"
ONE_WAY = "no closed walk through the root passes it: its group has no minimum of its own, and one unit is kept"
PRODUCT = "a factor of a product, in a network with too many pairs of units to tell whether there is a minimum"


@dataclass
class Attained:
    """Which units may move.

    Attributes:
        free: mask over units, ``(H,)``.
        reasons: why others may not: sentence -> ids (counted from 1).
        groups: unit that was kept (counted from 0) -> 1 if edges only enter its group, -1 if they only leave it, and
            the units of the group.
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


def attained(pairs: Pairs) -> Attained:
    """Keep as few units as it takes for the rest to have a minimum.

    ``sum_e c_e exp((A phi)_e)`` has a minimum exactly if no direction makes some terms smaller and none larger. A unit
    at which all terms have one sign is such a direction by itself. The others are found as closed walks: an edge whose
    ends do not reach each other can shrink for nothing. Each round keeps one unit of every group that only enters or
    only leaves; to its neighbours it is as good as the root, so the groups before it get their turn. Opposite scales
    are followed on a doubled graph, products by linear programmes.

    Args:
        pairs: sizes of the weights.
    """
    graph = pairs.graph
    result = Attained(np.ones(graph.num_units, bool))
    entering, leaving = pairs.counts()
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
            _programmes(_change(graph, *ends), result)
            return result
        result.fix(np.flatnonzero(np.asarray(abs(graph.forms).sum(0)).reshape(-1)), PRODUCT)
    while True:
        groups = _one_way(pairs, result.free)
        if not groups:
            return result
        result.groups |= groups
        result.fix(np.array(list(groups)), ONE_WAY)


def neighbours(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Which units have entering edges, and which have leaving ones, whatever the weights are; two masks, ``(H,)``."""
    entering, leaving = (np.zeros(pairs.graph.expand.shape[0]) for _ in range(2))
    for block in pairs.graph.blocks:
        head, tail = block.head, block.tail
        if block.unused is not None:
            used = ~block.unused.expand(block.shape)
            head, tail = (ids.expand(block.shape)[used] for ids in (head, tail))
        elif bool(torch.isin(head.reshape(-1), tail.reshape(-1)).any()):
            # weights whose ends share a scale neither enter nor leave
            head, tail = torch.broadcast_tensors(head, tail)
        if head.shape == tail.shape:
            head, tail = (ids[head != tail] for ids in (head, tail))
        for ids, into, against in ((head, entering, leaving), (tail, leaving, entering)):
            found = ids.unique().numpy()
            into[found[found > 0]], against[-found[found < 0]] = 1, 1
    entering, leaving = pairs.to_units(entering, leaving)
    return entering > 0, leaving > 0


def _change(graph: Structure, tails: np.ndarray, heads: np.ndarray) -> csr_array:
    """How log-scales of units move the logarithm of each pair's size, ``(pairs, H)``."""
    expand = graph.expand[:, 1:]
    sides = [expand[np.abs(ids)].multiply(np.sign(ids)[:, None]).tocsr() for ids in (heads, tails)]
    return csr_array(sides[0] - sides[1])


def _arcs(pairs: Pairs, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """The doubled graph: arcs from tails to heads and, of opposite scales, from heads to tails; kept units are root."""
    count = len(free) + 1
    alive = np.concatenate([[False], free, np.zeros(pairs.graph.expand.shape[0] - count, bool)])

    def node(ids: np.ndarray) -> np.ndarray:
        place = np.where(alive[np.abs(ids)], np.abs(ids), 0)
        return np.where((place > 0) & (ids < 0), place + count, place)

    starts, ends, nodes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 2 * count

    def add(tail: np.ndarray, head: np.ndarray) -> None:
        starts.append(tail)
        ends.append(head)

    for table in pairs.tables:
        some = (table.sizes > 0).numpy()
        rows, columns = some.any(1), some.any(0)
        head, tail = table.head.numpy(), table.tail.numpy()
        if some[rows][:, columns].all():
            # all with all: one node between them says the same
            for sign in (1, -1):
                first, last = (head[rows], tail[columns])[::sign]
                add(np.full(len(first), nodes), node(sign * first))
                add(node(sign * last), np.full(len(last), nodes))
                nodes += 1
        else:
            row, column = np.nonzero(some)
            for sign in (1, -1):
                add(*(node(sign * ids) for ids in (tail[column], head[row])[::sign]))
    if pairs.listed:
        some = (pairs.listed[0] > 0).numpy()
        head, tail = (ids.numpy()[some] for ids in pairs.listed[1:])
        for sign in (1, -1):
            add(*(node(sign * ids) for ids in (tail, head)[::sign]))
    return np.concatenate(starts), np.concatenate(ends), nodes


def _one_way(pairs: Pairs, free: np.ndarray) -> dict[int, tuple[int, np.ndarray]]:
    """Groups that edges only enter (1) or only leave (-1), the root's apart, by one unit of each (counted from 0)."""
    count = len(free) + 1
    starts, ends, nodes = _arcs(pairs, free)
    links = coo_array((np.ones(len(starts), bool), (starts, ends)), shape=(nodes, nodes))
    groups, label = connected_components(links, directed=True, connection="strong")
    across = label[starts] != label[ends]
    closed = np.ones((2, groups), bool)
    closed[0, label[starts][across]] = False
    closed[1, label[ends][across]] = False
    plus, minus = label[1:count], label[count + 1 : 2 * count]
    wanted = free & (plus != label[0]) & (plus != minus) & (closed[0] | closed[1])[plus]
    units = np.flatnonzero(wanted)
    # a group and its mirror image are one
    _, first = np.unique(np.minimum(plus, minus)[units], return_index=True)
    return {
        int(unit): (1 if closed[0, plus[unit]] else -1, np.flatnonzero((plus == plus[unit]) | (minus == plus[unit])))
        for unit in units[first]
    }


def _programmes(change: csr_array, result: Attained) -> None:
    """The same where terms hang on several units: terms that no non-negative combination of all brings back."""
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
        # the dual solution is a direction along which all these terms shrink: keep the unit that it moves most
        size = np.abs(found.eqlin.marginals)
        result.fix(np.flatnonzero(result.free)[[int(np.argmax(size >= size.max() * (1 - 1e-9)))]], ONE_WAY)
    result.fix(np.flatnonzero(result.free), ONE_WAY)
