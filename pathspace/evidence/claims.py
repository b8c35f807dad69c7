"""Statements from the literature, tested: each is computed on a given network, with a
counterexample if it fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import InputError
from ..graph.structure import Structure
from ..paths.counting_vectors import modular_rank
from ..paths.skeleton import Skeleton
from ..shown import Shown
from .certificate import MARKS
from .layered import LayeredMLP, count_selected, smallest_counterexample


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
        skeleton: a skeleton of the network's reduction graph (only its graph is used).

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
    result = partial(Claim, "hierarchical", statement, source, dimension=graph.dimension)
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
