"""The paths with at most one edge outside the skeleton: counted without listing them,
and the smallest network on which they are not a basis.

Their number is ``N = #skeleton-only paths + sum over all other edges e = (u, v) of pre(u) suf(v)``,
with ``pre(v)`` and ``suf(v)`` the numbers of ways from the root to ``v`` and back by edges of the
skeleton.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..graph.parts import WeightBlock
from ..graph.structure import Structure
from ..paths.counting_vectors import modular_rank
from ..paths.skeleton import Skeleton

MOST_WEIGHTS = 16


def count_selected(skeleton: Skeleton) -> tuple[int, int, bool] | str:
    """Number of skeleton-only paths, of all selected paths, and whether the graph is
    recurrent; or why there is none.

    Exact integers, in time linear in the ids of the graph: no path is listed, no edge
    outside the skeleton is visited.
    """
    graph = skeleton.graph
    if graph.forms.shape[0] or any(
        bool((ids < 0).any()) for b in graph.blocks for ids in (b.tail, b.head)
    ):
        return "it relates products of scales, or opposite ones"
    trees = (skeleton.tree_in, skeleton.tree_out)
    if not all(tree.forward[1:].all() for tree in trees):
        return (
            "a tree of its skeleton walks an edge backwards (a normalisation cuts paths), and the"
            " rule knows none"
        )
    component = _components(graph)
    chosen: dict[tuple[int, int], tuple[int, int]] = {}
    for tree in trees:
        for block, units in tree.by_block():
            flat = np.unique(tree.index[units])
            tails, heads = (ids.tolist() for ids in graph.blocks[block].ends_at(flat))
            edges = [(block, place) for place in flat.tolist()]
            chosen |= dict(zip(edges, zip(tails, heads, strict=True), strict=True))
    if any(u and v and component[u] == component[v] for u, v in chosen.values()):
        return "its skeleton runs in a circle (a residual stream), and the rule speaks of layers"
    before, after = _ways(chosen.values(), graph.num_units)
    alone = sum(after[v] for u, v in chosen.values() if u == 0)
    total = alone - sum(before[u] * after[v] for u, v in chosen.values())
    for entry in graph.blocks:
        total += _through(entry, before, after)
    sizes = np.bincount(component[1:])
    loops = any(bool((b.tail == b.head).any() and (b.tail != 0).any()) for b in graph.blocks)
    return alone, total, bool((sizes > 1).any()) or loops


def _components(graph: Structure) -> np.ndarray:
    """Strongly connected components of the units, the root left out: edges
    within one are recurrent.

    A matrix joins all its tails to all its heads, so one node in its middle
    stands for all of its edges.
    """
    count = graph.num_units + 1
    tails, heads, extra = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], count
    for block in graph.blocks:
        both = [
            d
            for d in range(block.tail.dim())
            if block.tail.shape[d] > 1 and block.head.shape[d] > 1
        ]
        sides = []
        for ids in (block.tail, block.head):
            rest = [d for d in range(ids.dim()) if d not in both]
            table = ids.permute(*both, *rest) if ids.dim() else ids
            sides.append(
                table.reshape(int(np.prod([ids.shape[d] for d in both], dtype=int)), -1).numpy()
            )
        middle = extra + np.arange(len(sides[0]))[:, None]
        extra += len(sides[0])
        for near, own in ((sides[0], True), (sides[1], False)):
            kept = near != 0
            wide = np.broadcast_to(middle, near.shape)
            tails.append((near if own else wide)[kept])
            heads.append((wide if own else near)[kept])
    ends = np.concatenate(tails), np.concatenate(heads)
    matrix = coo_array((np.ones(len(ends[0]), bool), ends), shape=(extra, extra))
    return np.asarray(connected_components(matrix, directed=True, connection="strong")[1][:count])


def _ways(edges: Any, units: int) -> tuple[list[int], list[int]]:
    """Numbers of walks root -> v and v -> root along skeleton edges, exact;
    the skeleton has no circle.
    """
    entering: list[list[int]] = [[] for _ in range(units + 1)]
    leaving: list[list[int]] = [[] for _ in range(units + 1)]
    for u, v in edges:
        entering[v].append(u)
        leaving[u].append(v)

    def along(steps: list[list[int]]) -> list[int]:
        known = [1] + [0] * units
        for unit in TopologicalSorter(dict(enumerate(steps[1:], 1))).static_order():
            if unit:
                known[unit] = sum(known[other] for other in steps[unit])
        return known

    return along(entering), along(leaving)


def _through(block: WeightBlock, before: list[int], after: list[int]) -> int:
    """``sum over all edges of a block of pre(tail) suf(head)``, without looking at single
    edges where ends factor.
    """
    pre = np.array(before, dtype=object)[block.tail.numpy()]
    suf = np.array(after, dtype=object)[block.head.numpy()]
    if block.unused is not None:
        every = np.broadcast_to(pre, block.shape) * np.broadcast_to(suf, block.shape)
        return int(every.reshape(-1)[block.used].sum())
    times = 1
    for d, size in enumerate(block.shape):
        if pre.shape[d] > 1 and suf.shape[d] == 1:
            pre = pre.sum(d, keepdims=True)
        elif suf.shape[d] > 1 and pre.shape[d] == 1:
            suf = suf.sum(d, keepdims=True)
        elif pre.shape[d] == suf.shape[d] == 1:
            times *= size
    return int((pre * suf).sum()) * times


@lru_cache
def smallest_counterexample(
    recurrent: bool, rule: str, most_weights: int = MOST_WEIGHTS
) -> dict[str, Any] | None:
    """The layered network with the fewest weights on which the printed rule gives no
    basis, by search over widths.

    Args:
        recurrent: search stacked recurrent networks.
        rule: ``"modulo"`` for Algorithm 1's choice, anything else for any choice of edges.
        most_weights: how far to search.

    Returns:
        Widths, weights, skeleton, all selected paths, their number and rank; ``None`` if
        there is none that small.
    """
    for net in by_width(recurrent, most_weights):
        skeletons = [net.modulo()] if rule == "modulo" else list(net.selections())
        wrong = [
            skeleton
            for skeleton in skeletons
            if net.count(skeleton) != net.num_weights - net.num_units
        ]
        if not wrong:
            continue
        walks = sorted(net.selected(wrong[0]))
        rank = modular_rank(net.vectors(walks))
        dimension = net.num_weights - net.num_units
        words = (
            f"{net}: {net.num_weights} weights, {len(walks)} paths selected, rank {rank} (m - H ="
            f" {dimension})"
        )
        words += (
            f"; fails for {len(wrong)} of {len(skeletons)} selections of edges"
            if len(skeletons) > 1
            else ""
        )
        return {
            "summary": words,
            "widths": list(net.widths),
            "recurrent": recurrent,
            "weights": net.num_weights,
            "dimension": dimension,
            "skeleton": [_edge(net, i) for i in sorted(wrong[0])],
            "paths": [" ".join(_edge(net, i) for i in walk) for walk in walks],
            "rank": rank,
            "failing_selections": len(wrong),
            "selections": len(skeletons),
        }
    return None


def _edge(net: LayeredMLP, number: int) -> str:
    (layer, i), (to, j) = net.edges[number]
    return f"{layer}.{i + 1}->{to}.{j + 1}"


@dataclass(frozen=True)
class LayeredMLP:
    """A fully connected network without biases, possibly with recurrent
    matrices on all hidden layers.

    Attributes:
        widths: inputs, hidden layers, outputs.
        recurrent: whether every hidden layer feeds itself at the next time step.
    """

    widths: tuple[int, ...]
    recurrent: bool = False

    @cached_property
    def edges(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
        """Edges as pairs of nodes (layer, position); recurrent ones stay within a layer."""
        found = []
        for layer, (n, k) in enumerate(itertools.pairwise(self.widths)):
            found += [((layer, i), (layer + 1, j)) for j in range(k) for i in range(n)]
            if self.recurrent and layer + 2 < len(self.widths):
                found += [((layer + 1, i), (layer + 1, j)) for j in range(k) for i in range(k)]
        return tuple(found)

    @property
    def num_weights(self) -> int:
        """``m``."""
        return len(self.edges)

    @property
    def num_units(self) -> int:
        """``H``: the hidden units."""
        return sum(self.widths[1:-1])

    def modulo(self) -> frozenset[int]:
        """Algorithm 1's union skeleton: unit ``j`` is entered from ``j mod n_before``,
        left to ``j mod n_after``.
        """
        chosen = set()
        for layer in range(1, len(self.widths) - 1):
            for j in range(self.widths[layer]):
                chosen.add(((layer - 1, j % self.widths[layer - 1]), (layer, j)))
                chosen.add(((layer, j), (layer + 1, j % self.widths[layer + 1])))
        return frozenset(i for i, edge in enumerate(self.edges) if edge in chosen)

    def selections(self) -> Iterator[frozenset[int]]:
        """Every union skeleton that picking one entering and one leaving edge per hidden unit can
        give.
        """
        choices: list[list[int]] = []
        forward = [(i, e) for i, e in enumerate(self.edges) if e[0][0] != e[1][0]]
        for unit in ((n, j) for n, width in enumerate(self.widths[1:-1], 1) for j in range(width)):
            choices.append([i for i, (_, head) in forward if head == unit])
            choices.append([i for i, (tail, _) in forward if tail == unit])
        return iter(dict.fromkeys(map(frozenset, itertools.product(*choices))))

    def selected(self, skeleton: frozenset[int]) -> list[list[int]]:
        """The paths that pass at most one edge outside the skeleton, as
        sequences of edge numbers.
        """
        leaving: dict[tuple[int, int], list[int]] = {}
        for i, (tail, _) in enumerate(self.edges):
            leaving.setdefault(tail, []).append(i)
        found = []
        stack: list[tuple[tuple[int, int], list[int], int]] = [
            ((0, i), [], 0) for i in range(self.widths[0])
        ]
        while stack:
            node, walk, outside = stack.pop()
            if node[0] == len(self.widths) - 1:
                found.append(walk)
                continue
            for i in leaving[node]:
                more = outside + (i not in skeleton)
                if more <= 1:
                    stack.append((self.edges[i][1], [*walk, i], more))
        return found

    def count(self, skeleton: frozenset[int]) -> int:
        """How many paths the rule selects, from prefixes and suffixes, without listing one."""
        last = len(self.widths) - 1
        before = Counter((0, j) for j in range(self.widths[0]))
        after = Counter((last, j) for j in range(self.widths[last]))
        # (layer by layer, as the edges are listed)
        chosen = [(t, h) for i, (t, h) in enumerate(self.edges) if i in skeleton and t[0] != h[0]]
        for tail, head in chosen:
            before[head] += before[tail]
        for tail, head in reversed(chosen):
            after[tail] += after[head]
        others = (edge for i, edge in enumerate(self.edges) if i not in skeleton)
        alone = sum(after[0, j] for j in range(self.widths[0]))
        return alone + sum(before[tail] * after[head] for tail, head in others)

    def vectors(self, walks: Sequence[Sequence[int]]) -> np.ndarray:
        """Counting vectors of walks, one row each."""
        rows = np.zeros((len(walks), self.num_weights), np.int64)
        for row, walk in zip(rows, walks, strict=True):
            np.add.at(row, walk, 1)
        return rows

    def __str__(self) -> str:
        return ("RNN " if self.recurrent else "MLP ") + "-".join(map(str, self.widths))


def by_width(recurrent: bool, most_weights: int) -> Iterator[LayeredMLP]:
    """LayeredMLP networks with up to ``most_weights`` weights, smallest first, then
    fewest layers and units.
    """
    found = []
    for depth in range(3, most_weights + 2):
        stack: list[tuple[int, ...]] = [()]
        while stack:
            widths = stack.pop()
            for width in range(1, most_weights + 1):
                grown = (*widths, width)
                least = LayeredMLP(grown + (1,) * (depth - len(grown)), recurrent).num_weights
                if least > most_weights:
                    break
                if len(grown) == depth:
                    found.append(LayeredMLP(grown, recurrent))
                else:
                    stack.append(grown)
    yield from sorted(
        found,
        key=lambda net: (
            net.num_weights,
            len(net.widths),
            sum(net.widths),
            [-w for w in net.widths],
        ),
    )
