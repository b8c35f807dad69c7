"""A statement from the literature, tested on a given network, with a counterexample if it fails."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..gauge.pairs import MatrixLayout
from ..graph.parts import WeightBlock
from ..graph.structure import Structure
from ..paths.skeleton import Skeleton
from ..shown import Shown
from .certificate import MARKS

# the smallest layered networks on which the printed rule gives no basis, whichever edges it
# chooses, without and with recurrent layers (the tests go through all smaller ones)
COUNTEREXAMPLES: dict[bool, dict[str, Any]] = {
    False: {
        "summary": "MLP 2-1-2-1: 6 weights, 4 paths selected, rank 3 (m - H = 3)",
        "widths": [2, 1, 2, 1],
        "recurrent": False,
        "weights": 6,
        "dimension": 3,
        "skeleton": ["0.1->1.1", "1.1->2.1", "1.1->2.2", "2.1->3.1", "2.2->3.1"],
        "paths": (
            "0.1->1.1 1.1->2.1 2.1->3.1, 0.1->1.1 1.1->2.2 2.2->3.1, 0.2->1.1 1.1->2.1 2.1->3.1,"
            " 0.2->1.1 1.1->2.2 2.2->3.1"
        ).split(", "),
        "rank": 3,
    },
    True: {
        "summary": "RNN 1-2-1-1: 10 weights, 8 paths selected, rank 7 (m - H = 7)",
        "widths": [1, 2, 1, 1],
        "recurrent": True,
        "weights": 10,
        "dimension": 7,
        "skeleton": ["0.1->1.1", "0.1->1.2", "1.1->2.1", "1.2->2.1", "2.1->3.1"],
        "paths": (
            "0.1->1.1 1.1->1.1 1.1->2.1 2.1->3.1, 0.1->1.1 1.1->1.2 1.2->2.1 2.1->3.1,"
            " 0.1->1.1 1.1->2.1 2.1->2.1 2.1->3.1, 0.1->1.1 1.1->2.1 2.1->3.1,"
            " 0.1->1.2 1.2->1.1 1.1->2.1 2.1->3.1, 0.1->1.2 1.2->1.2 1.2->2.1 2.1->3.1,"
            " 0.1->1.2 1.2->2.1 2.1->2.1 2.1->3.1, 0.1->1.2 1.2->2.1 2.1->3.1"
        ).split(", "),
        "rank": 7,
    },
}


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
        >>> from torch.nn import Linear, Sequential
        >>> layers = (Linear(*sizes, bias=False) for sizes in [(2, 1), (1, 2), (2, 1)])
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
    result = partial(Claim, "printed-skeleton", statement, source, dimension=graph.dimension)
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
    example = COUNTEREXAMPLES[recurrent]
    return result(False, words, paths=total, rank=graph.dimension, counterexample=example)


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
    count, none = graph.num_units + 1, torch.zeros(0, dtype=torch.int64)
    tails, heads = [none], [none]
    for middle, block in enumerate(graph.blocks, count):
        layout = MatrixLayout(block.tail, block.head, block.shape)
        inside, across = (torch.full_like(ids, middle) for ids in (layout.head, layout.tail))
        # (a side or a tail is the root, which no edge within a component meets)
        tails += [layout.side, inside, layout.tail]
        heads += [layout.head, layout.head, across]
    ends = np.stack([torch.cat(tails).numpy(), torch.cat(heads).numpy()])
    ends = ends[:, (ends != 0).all(0)]
    shape = 2 * (count + len(graph.blocks),)
    matrix = coo_array((np.ones(ends.shape[1], bool), tuple(ends)), shape=shape)
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
    pre, suf = (np.array(ways, dtype=object) for ways in (before, after))
    if block.unused is not None:
        tails, heads = block.ends_at(block.places)
        return int((pre[tails] * suf[heads]).sum())
    layout = MatrixLayout(block.tail, block.head, block.shape)
    # (one way leads to the root: of a side and a tail, one is the root)
    rows = (pre[layout.side.numpy()] * suf[layout.head.numpy()]).sum()
    times = block.numel // max(len(layout.head) * len(layout.tail), 1)
    return int(rows * pre[layout.tail.numpy()].sum()) * times
