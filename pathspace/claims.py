"""Statements from the literature, tested: each is computed on a given network, with a
counterexample if it fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pathspace.certificate import MARKS
from pathspace.errors import InputError
from pathspace.exact import modular_rank
from pathspace.layered_mlp import LayeredMLP, by_size
from pathspace.reduction import WeightBlock
from pathspace.shown import Shown
from pathspace.skeleton import Skeleton
from pathspace.structure import Structure

MOST_WEIGHTS = 16


@dataclass(frozen=True)
class Claim(Shown):
    """A statement, and its verdict on one network.

    Attributes:
        name: short name.
        statement: what is claimed.
        source: who claims it, where.
        verdict: whether it holds on this network; ``None`` if it does not apply to such networks.
        evidence: figures in a sentence.
        paths: how many paths the rule selects.
        rank: their rank; ``None`` where it does not follow.
        dimension: ``m - H``, the number of independent path values.
        counterexample: where it fails, the smallest layered network on which it
            does, with all its paths.
    """

    name: str
    statement: str
    source: str
    verdict: bool | None
    evidence: str
    paths: int | None = None
    rank: int | None = None
    dimension: int | None = None
    counterexample: dict[str, Any] | None = field(default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __rich__(self) -> Any:
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            box=box.SIMPLE, title=f"Claim: {self.name}", title_justify="left", show_header=False
        )
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        table.add_row("statement", escape(self.statement))
        table.add_row("source", escape(self.source))
        table.add_row("verdict", MARKS[self.verdict])
        table.add_row("evidence", escape(self.evidence))
        if self.counterexample is not None:
            table.add_row("smallest counterexample", escape(self.counterexample["summary"]))
            for path in self.counterexample["paths"]:
                table.add_row("", escape(path))
        return table


def printed_skeleton(skeleton: Skeleton) -> Claim:
    """Is the set of all paths with at most one edge outside the union skeleton a basis, as printed?

    The set is counted without listing it. With ``pre(v)`` and ``suf(v)`` the numbers of ways from
    the root to ``v`` and back by non-recurrent skeleton edges alone,

    ``N = #skeleton-only paths + sum over all other edges e = (u, v) of pre(u) suf(v)``,

    and recurrent edges are among the others. The set contains every basis path of the two trees, so
    it always spans (rank ``m - H``), and is a basis exactly if ``N = m - H``.

    Args:
        skeleton: the skeleton whose union is taken.

    Returns:
        The claim with its verdict.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> layers = [
        ...     Linear(2, 1, bias=False),
        ...     ReLU(),
        ...     Linear(1, 2, bias=False),
        ...     ReLU(),
        ...     Linear(2, 1, bias=False),
        ... ]
        >>> claim = printed_skeleton(ps.trace(Sequential(*layers), torch.randn(1, 2)).skeleton())
        >>> claim.verdict, claim.paths, claim.rank
        (False, 4, 3)

    Reference:
        Path space for recurrent neural networks with ReLU activations,
        Skeleton Method and Theorem 3.
    """
    statement = (
        "The paths that pass at most one edge outside the skeleton, the union of one entering and"
        " one leaving edge per unit, are a basis of path space."
    )
    source = (
        "path-space paper, Skeleton Method (one hidden layer, 'also held' for stacks), Theorem 3"
    )
    graph = skeleton.graph

    def result(verdict: bool | None, evidence: str, **more: Any) -> Claim:
        return Claim(
            "printed-skeleton",
            statement,
            source,
            verdict,
            evidence,
            dimension=graph.dimension,
            **more,
        )

    found = count_selected(skeleton)
    if isinstance(found, str):
        return result(None, f"says nothing about this network: {found}")
    alone, total, recurrent = found
    words = (
        f"the rule selects {total:,} paths ({alone:,} of them on the skeleton alone) of rank"
        f" {graph.dimension:,}"
    )
    if total == graph.dimension:
        return result(True, f"{words} = m - H: a basis", paths=total, rank=graph.dimension)
    words += f" = m - H: {total - graph.dimension:,} too many, which depend on the others"
    example = smallest_counterexample(recurrent, skeleton.rule)
    return result(False, words, paths=total, rank=graph.dimension, counterexample=example)


def hierarchical(skeleton: Skeleton) -> Claim:
    """Can the widths of a network be covered by parallel paths that share no edge, as
    hierarchical sets demand?

    The construction decomposes a fully connected network into independent substructure paths, no
    two of which share an edge, that together pass every hidden unit; the other basis paths leave
    them by one edge. That takes as many edge-disjoint paths as the widest layer has units, and a
    layer of ``a`` units meets the next of ``b`` by only ``a b`` edges: between the hidden layers
    and at both ends, ``a b`` must not be less than the widest layer.

    Args:
        skeleton: a skeleton of the network's reduction graph (only its graph is looked at).

    Returns:
        The claim with its verdict: whether the demand can be met.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> layers = [
        ...     Linear(2, 1, bias=False),
        ...     ReLU(),
        ...     Linear(1, 2, bias=False),
        ...     ReLU(),
        ...     Linear(2, 1, bias=False),
        ... ]
        >>> hierarchical(ps.trace(Sequential(*layers), torch.randn(1, 2)).skeleton()).verdict
        False

    Reference:
        Zhu, Meng, Chen, Ma: Interpreting basis path set in neural networks (arXiv 1910.09402),
        Algorithm HBPS, as far as its abstract states the demand.
    """
    statement = (
        "A network decomposes into parallel paths through all hidden units, no two of which share"
        " an edge; these, and the paths that leave them by a single edge, are a basis."
    )
    source = "Zhu, Meng, Chen, Ma (arXiv 1910.09402), algorithm HBPS, by its abstract"
    graph = skeleton.graph

    def result(verdict: bool | None, evidence: str, **more: Any) -> Claim:
        return Claim(
            "hierarchical", statement, source, verdict, evidence, dimension=graph.dimension, **more
        )

    widths = _widths(graph)
    if widths is None:
        return result(
            None, "says nothing about this network: it is not a stack of fully connected layers"
        )
    widest = max(widths[1:-1])
    narrow = next((pair for pair in pairwise(widths) if pair[0] * pair[1] < widest), None)
    shown = "-".join(map(str, widths))
    if narrow is not None:
        words = (
            f"on widths {shown} the {widest} units of the widest layer need {widest} paths without"
            " a common edge, "
        )
        return result(False, f"{words}but {narrow[0]} x {narrow[1]} edges lie between two layers")
    paths = _parallel(widths)
    net = LayeredMLP(widths)
    dimension = net.num_weights - net.num_units
    chosen = frozenset(edge for path in paths for edge in path)
    total = net.count(chosen)
    words = (
        f"on widths {shown} {widest} paths without a common edge pass all hidden units; with the"
        " paths that leave "
    )
    words += f"their union by one edge there are {total:,}, and m - H = {dimension:,}"
    words += " (biases set aside)" if dimension != graph.dimension else ""
    if total != dimension:
        return result(False, words + ": too many, so they depend on each other", paths=total)
    rank = (
        modular_rank(net.vectors(net.selected(chosen)))
        if total <= 2_500 and net.num_weights <= 2_500
        else None
    )
    return result(
        None if rank is None else rank == total, f"{words}, of rank {rank}", paths=total, rank=rank
    )


CLAIMS: dict[str, Callable[[Skeleton], Claim]] = {
    "printed-skeleton": printed_skeleton,
    "hierarchical": hierarchical,
}


def claim(name: str, skeleton: Skeleton) -> Claim:
    """Test a claim from the literature on a skeleton.

    Args:
        name: ``"printed-skeleton"`` (the paths with at most one edge outside the union of both
            trees are a basis) or ``"hierarchical"`` (so are parallel paths through all hidden
            units, and those that leave them by one edge).
        skeleton: the two trees of a reduction graph.

    Returns:
        The verdict, with figures and, where the claim fails, the smallest counterexample.

    Raises:
        InputError: no such claim.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> found = claim("printed-skeleton", ps.trace(model, torch.randn(1, 2)).skeleton())
        >>> found.verdict, found.paths == found.rank == found.dimension
        (True, True)

    Reference:
        Path space for recurrent neural networks with ReLU activations, Skeleton Method and Theorem
        3; the abstract of arXiv 1910.09402.
    """
    if name not in CLAIMS:
        raise InputError(
            f"There is no claim {name!r}, expected one of {', '.join(map(repr, CLAIMS))}."
        )
    return CLAIMS[name](skeleton)


def count_selected(skeleton: Skeleton) -> tuple[int, int, bool] | str:
    """Number of skeleton-only paths, of all selected paths, and whether the graph is
    recurrent; or why there is none.

    Exact integers, in time linear in the ids of the graph: no path is listed, no edge
    outside the skeleton looked at.
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
            entry = graph.blocks[block]
            for flat in np.unique(tree.index[units]).tolist():
                index = np.unravel_index(flat, entry.shape) if entry.shape else ()
                place = [
                    tuple(int(i) if n > 1 else 0 for i, n in zip(index, ids.shape, strict=True))
                    for ids in (entry.tail, entry.head)
                ]
                chosen[block, flat] = int(entry.tail[place[0]]), int(entry.head[place[1]])
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
        known: list[int | None] = [1] + [None] * units
        for start in range(1, units + 1):
            pending = [start]
            while pending:
                unit = pending[-1]
                if known[unit] is not None:
                    pending.pop()
                    continue
                missing = [other for other in steps[unit] if known[other] is None]
                if missing:
                    pending += missing
                else:
                    known[unit] = sum(known[other] or 0 for other in steps[unit])
        return [ways or 0 for ways in known]

    return along(entering), along(leaving)


def _through(block: WeightBlock, before: list[int], after: list[int]) -> int:
    """``sum over all edges of a block of pre(tail) suf(head)``, without looking at single
    edges where ends factor.
    """
    pre = np.array(before, dtype=object)[block.tail.numpy()]
    suf = np.array(after, dtype=object)[block.head.numpy()]
    if block.unused is not None:
        alive = ~block.unused.expand(block.shape).numpy()
        return int(
            (np.broadcast_to(pre, block.shape) * np.broadcast_to(suf, block.shape))[alive].sum()
        )
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
    for net in by_size(recurrent, most_weights):
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


def _widths(graph: Structure) -> tuple[int, ...] | None:
    """Widths of a stack of matrices (biases set aside), or ``None`` for any other graph."""
    matrices = [block for block in graph.blocks if len(block.shape) == 2 and block.unused is None]
    others = [block for block in graph.blocks if len(block.shape) != 2]
    if (
        not matrices
        or any(bool((block.tail != 0).any()) for block in others)
        or graph.forms.shape[0]
    ):
        return None
    widths, last = [matrices[0].shape[1]], np.zeros(matrices[0].shape[1], np.int64)
    for block in matrices:
        tail = np.broadcast_to(block.tail.numpy().reshape(-1), (block.shape[1],))
        if not np.array_equal(tail, last):
            return None
        last = np.broadcast_to(block.head.numpy().reshape(-1), (block.shape[0],))
        if block is not matrices[-1] and len(np.unique(last)) < len(last):
            return None
        widths.append(block.shape[0])
    return tuple(widths) if not last.any() and len(widths) > 2 else None


def _parallel(widths: tuple[int, ...]) -> list[list[int]]:
    """As many paths as the widest hidden layer has units, no two with a common edge,
    through every hidden unit.
    """
    net, count = LayeredMLP(widths), max(widths[1:-1])
    number = {edge: i for i, edge in enumerate(net.edges)}
    here = [i % widths[0] for i in range(count)]
    paths: list[list[int]] = [[] for _ in range(count)]
    for layer, width in enumerate(widths[1:]):
        # in order of where they are, paths from one unit get consecutive turns, hence
        # different units to go to
        order = sorted(range(count), key=lambda i: here[i])
        there = {i: turn % width for turn, i in enumerate(order)}
        for i in range(count):
            paths[i].append(number[(layer, here[i]), (layer + 1, there[i])])
            here[i] = there[i]
    return paths
