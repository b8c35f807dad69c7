"""A statement from the literature, tested on a given network, with a counterexample if it fails."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..paths.skeleton import Skeleton
from ..shown import Shown, text_table
from .certificate import mark

# one number per edge is kept while paths are counted
MOST_WEIGHTS = 10_000_000
# the smallest layered networks on which the printed rule gives no basis, whichever edges it
# chooses, without and with recurrent layers (the tests go through all smaller ones)
COUNTEREXAMPLES: dict[bool, dict[str, Any]] = {
    False: {
        "summary": "MLP 2-1-2-1: 6 weights, 4 paths selected, rank 3 (m - H = 3)",
        "widths": [2, 1, 2, 1],
        "weights": 6,
        "dimension": 3,
        "rank": 3,
    },
    True: {
        "summary": "RNN 1-2-1-1: 10 weights, 8 paths selected, rank 7 (m - H = 7)",
        "widths": [1, 2, 1, 1],
        "weights": 10,
        "dimension": 7,
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
        counterexample: where it fails, the smallest layered network on which it does.
    """

    name: str
    statement: str
    source: str
    verdict: bool | None
    evidence: str
    paths: int | None = None
    rank: int | None = None
    dimension: int | None = None
    counterexample: dict[str, Any] | None = None

    def to_json(self, indent: int | None = 2) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __rich__(self) -> Any:
        rows: list[tuple[str, Any]] = [
            ("statement", self.statement),
            ("source", self.source),
            ("verdict", mark(self.verdict)),
            ("evidence", self.evidence),
        ]
        if self.counterexample is not None:
            rows.append(("smallest counterexample", self.counterexample["summary"]))
        return text_table(f"Claim: {self.name}", ("", ""), rows)


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
    basis, more = total == graph.dimension, total - graph.dimension
    verdict = "a basis" if basis else f"{more:,} too many, which depend on the others"
    words = (
        f"the rule selects {total:,} paths ({alone:,} of them on the skeleton alone) of rank"
        f" {graph.dimension:,} = m - H: {verdict}"
    )
    example = None if basis else COUNTEREXAMPLES[recurrent]
    return result(basis, words, paths=total, rank=graph.dimension, counterexample=example)


def count_selected(skeleton: Skeleton) -> tuple[int, int, bool] | str:
    """Number of skeleton-only paths, of all selected paths, and whether the graph is
    recurrent; or why there is none.

    Exact integers, in time linear in the edges: no path is listed.
    """
    graph = skeleton.graph
    if not all(tree.forward[1:].all() for tree in (skeleton.tree_in, skeleton.tree_out)):
        return (
            "a tree of its skeleton walks an edge backwards (a normalisation cuts paths), and the"
            " rule knows none"
        )
    if graph.num_weights > MOST_WEIGHTS:
        return f"it has more than {MOST_WEIGHTS:,} weights"
    tails, heads = graph.ends()
    if graph.forms.shape[0] or (tails < 0).any() or (heads < 0).any():
        return "it relates products of scales, or opposite ones"
    # edges within a strongly connected component, the root left out, are recurrent
    inside = (tails != 0) & (heads != 0)
    size = 2 * (graph.num_units + 1,)
    matrix = coo_array((np.ones(inside.sum(), bool), (tails[inside], heads[inside])), shape=size)
    component = connected_components(matrix, directed=True, connection="strong")[1]
    number = skeleton.edges()
    chosen = list(zip(tails[number].tolist(), heads[number].tolist(), strict=True))
    if any(u and v and component[u] == component[v] for u, v in chosen):
        return "its skeleton runs in a circle (a residual stream), and the rule speaks of layers"
    before = _ways(chosen, graph.num_units)
    after = _ways([(v, u) for u, v in chosen], graph.num_units)
    alone = int(sum(after[v] for u, v in chosen if u == 0))
    total = alone + int((before[tails] * after[heads]).sum())
    total -= sum(before[u] * after[v] for u, v in chosen)
    recurrent = inside & (component[tails] == component[heads])
    return alone, total, bool(recurrent.any())


def _ways(edges: list[tuple[int, int]], units: int) -> np.ndarray:
    """Numbers of walks from the root to every unit on the skeleton, which has no circle."""
    entering: dict[int, list[int]] = {unit: [] for unit in range(1, units + 1)}
    for u, v in edges:
        if v:
            entering[v].append(u)
    ways = np.array([1] + [0] * units, dtype=object)
    for v in TopologicalSorter(entering).static_order():
        if v:
            ways[v] = sum(ways[u] for u in entering[v])
    return ways
