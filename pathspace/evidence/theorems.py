"""Theorems 1, 2 and 3 of the path-space paper, tested on a given graph."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array, triu
from torch import Tensor

from ..errors import UnsupportedError
from ..graph.spanning_tree import SpanningTree, changes
from ..graph.structure import Structure
from ..inference.unrolled import Unrolled, unroll
from ..inference.values import shape_of
from ..models.running import difference, switched
from ..paths.basis import BasisPaths
from ..paths.counting_vectors import modular_rank, whole_product
from ..paths.symbolic import MOST_WEIGHTS, symbolic
from .bench import Workbench, holding

MATRIX_WEIGHTS = 2_500
ENUMERATED = 50_000
CHECKED = 2_000
# (repeated squares pass a weight so often that one path takes longer to enumerate
# than all others together)
LONGEST = 1_024
ELEMENTS = 50_000


def enumerable(graph: Structure) -> Unrolled | None:
    """The unrolled network; ``None`` if it is too large, or has quotients (no paths)."""
    if graph.num_weights > MATRIX_WEIGHTS:
        return None
    shown = (node.meta.get("val") for node in graph.captured.graph.graph.nodes)
    if any(isinstance(value, Tensor) and prod(shape_of(value)) > ELEMENTS for value in shown):
        return None
    try:
        network = unroll(graph)
    except UnsupportedError:
        return None
    few = not network.has_quotients and network.longest() <= LONGEST
    return network if few else None


def tree_problem(graph: Structure, tree: SpanningTree) -> str | None:
    """Why an edge of a tree does not connect its unit to units reached before."""
    order = np.concatenate([np.zeros(0, np.int64), *tree.rounds])
    if missing := graph.num_units - len(np.unique(order)):
        return f"{missing} units are not reached"
    ends = np.zeros((2, graph.num_units + 1), np.int64)
    for i, units in tree.by_block():
        ends[:, units] = graph.blocks[i].ends_at(tree.index[units])
    # an edge must move by its own unit with coefficient +-1, and else by units before it
    change = changes(graph, *ends[:, order])[:, order]
    others = np.diff(csr_array(triu(change, 1)).indptr)
    wrong = order[(np.abs(change.diagonal()) != 1) | (others > 0)]
    told = "does not connect it to units reached before"
    return f"the edge of unit {wrong[0]} {told}" if len(wrong) else None


def small_matrix(basis: BasisPaths) -> csr_array | None:
    """The counting matrix, or ``None`` if it is too large or an entry does not fit into 64 bits."""
    if basis.graph.num_weights > MATRIX_WEIGHTS:
        return None
    try:
        return basis.counting_matrix()
    except UnsupportedError:
        return None


def theorem1(
    basis: BasisPaths, network: Unrolled | None, matrix: csr_array | None, problem: str | None
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Theorem 1: paths are integer combinations of basis paths; with counting vectors."""
    graph = basis.graph
    if network is None or matrix is None:
        words = "every circulation is an integer combination, by two trees checked edge by edge"
        found = {"holds": problem is None, "evidence": problem or words}
        return found | {"paths": None, "exhaustive": False}, None
    walks = list(islice(network.walks(), ENUMERATED + 1))
    exhaustive = len(walks) <= ENUMERATED
    total = len(walks[:ENUMERATED])
    if total > CHECKED:
        walks = [walks[i] for i in np.random.default_rng(0).choice(total, CHECKED, replace=False)]
    if not walks:
        words = "the network has no path through weights"
        return {"holds": None, "evidence": words, "paths": 0, "exhaustive": True}, None
    edges = (np.array([edge for edge in network.edges(walk) if edge >= 0], int) for walk in walks)
    vectors = np.stack([np.bincount(each, minlength=graph.num_weights) for each in edges])
    coefficients = basis.coefficients(vectors)
    wrong = np.flatnonzero((whole_product(coefficients, matrix) != vectors).any(1))
    largest = int(np.abs(coefficients).max(initial=0))
    number = f"{'' if exhaustive else 'more than '}{total:,} unrolled paths"
    words = f"all {number}" if total == len(walks) else f"{len(walks):,} of {number}"
    words += f" have integer coefficients, largest {largest}"
    if len(wrong):
        words = f"{len(wrong):,} of {len(walks):,} paths are not reproduced by their coefficients"
    evidence = {
        "holds": len(wrong) == 0,
        "evidence": words,
        "paths": len(walks),
        # (a batch may be too small for every row of one table to meet those of another)
        "exhaustive": exhaustive and total == len(walks) and network.rows_meet,
        "largest_coefficient": largest,
    }
    if graph.num_weights <= MOST_WEIGHTS and not len(wrong):
        # the equation of the path with the most basis paths
        row = int(np.argmax(np.count_nonzero(coefficients, axis=1)))
        evidence["example"] = symbolic(basis.skeleton).equation(vectors[row])
    return evidence, vectors


def theorem2(
    basis: BasisPaths, bench: Workbench, invariance: tuple[dict[str, Any], tuple[int, int]]
) -> dict[str, Any]:
    """Theorem 2: path values and signs determine activations: rebuild the network."""
    graph, skeleton, model = basis.graph, basis.skeleton, bench.model
    if bench.large:
        evidence, (wrong, total) = invariance
        return {
            "holds": bool(evidence["holds"]) and wrong == 0,
            "evidence": (
                "a randomly rescaled network with the same path values and signs has equal outputs"
                f" and {total - wrong:,} of {total:,} equal activations"
            ),
            "rebuilt": False,
            "switched": wrong,
            "rectifiers": total,
        }
    # path values of the model that runs, in which some weights may have been redrawn
    graph = replace(
        graph,
        parameters={**graph.parameters, **dict(model.named_parameters(remove_duplicate=False))},
    )
    skeleton = replace(skeleton, graph=graph)
    basis = BasisPaths(skeleton)
    weights = [tree.gather(graph) for tree in (skeleton.tree_in, skeleton.tree_out)]
    if any(bool((values == 0).any()) for values in weights):
        return _not_rebuilt(
            "a skeleton weight is 0, so path values do not determine the weights behind it"
        )
    rebuilt = basis.rebuild(basis.values(), skeleton.signs())
    # a rectifier behind unused weights is on no path, so path values do not determine its scale
    dangling = any(block.unused is not None for block in graph.blocks) or bool(graph.unused)
    with bench.without_eps():
        before = bench.run()
        with holding(model, rebuilt):
            after = bench.run()
        if not bool(after.outputs.isfinite().all()) and bool(before.outputs.isfinite().all()):
            return _not_rebuilt(
                "the activations of the network rebuilt with leaving weights of size 1 exceed the"
                " range of floating point"
            )
        tolerance = 1e-6 if bench.resolution(before)[0] == torch.float64 else 1e-2
        gap, (wrong, total) = difference(before, after), switched(before, after)
        words = f"{total - wrong:,} of {total:,} rectifiers are switched alike"
        if wrong and dangling:
            words += " (the others may lie on no path: some weights are unused)"
        holds: bool | None = gap <= tolerance
        if holds and wrong and not dangling:
            # outputs that need not read them say nothing of the others
            holds = None
        if holds is False and bench.rounding_decides(before, tolerance):
            holds = None
            words += "; so they do where weights change in their last digits only:"
            words += " rounding decides, and nothing can be said"
    return {
        "holds": holds,
        "evidence": f"rebuilt from path values: outputs differ by {gap:.1e}, {words}",
        "rebuilt": True,
        "max_relative_difference": gap,
        "switched": wrong,
        "rectifiers": total,
        "tolerance": tolerance,
    }


def _not_rebuilt(reason: str) -> dict[str, Any]:
    return {"holds": None, "evidence": reason, "rebuilt": False}


def theorem3(
    basis: BasisPaths,
    matrix: csr_array | None,
    vectors: np.ndarray | None,
    exhaustive: bool,
    problem: str | None,
) -> tuple[dict[str, Any], int | None]:
    """Theorem 3: there are exactly ``m - H`` basis paths, and they are independent.

    The upper bound ``rank <= m - H`` follows from the ``H`` gauge generators, which are
    independent because each changes the edge of ``T_in`` that enters its unit. The lower bound
    follows from the triangular form of the two-tree basis, or from a rank modulo a prime, which is
    returned, if the graph is small enough for a matrix.
    """
    graph = basis.graph
    count, wanted = len(basis), graph.dimension
    if problem is not None:
        return {"holds": False, "evidence": problem}, None
    if matrix is None:
        # outside ``T_out`` one unshared edge enters each chain (products of scales, whose ids are
        # beyond those of the units, have none)
        skeleton = basis.skeleton
        units = np.setdiff1d(np.arange(1, graph.num_units + 1), skeleton.shared)
        entered = np.unique(skeleton.chain[units])
        triangular = len(entered) == len(units) == skeleton.num_chains and bool(entered.all())
        words = f"{graph.num_units:,} independent gauge generators bound the rank from above, "
        words += f"{count:,} triangular basis paths from below"
        return {"holds": count == wanted and triangular, "evidence": words, "matrix": "none"}, None
    rank, of = modular_rank(matrix), "rank of the basis paths"
    holds = rank == count == wanted
    words = f"{count:,} basis paths of rank {rank:,}"
    words += " = m - H" if holds else f", m - H = {wanted:,}"
    every = 0 if vectors is None or graph.has_cuts else modular_rank(vectors)
    if vectors is not None and every and (exhaustive or every == wanted):
        words += f"; {len(vectors):,} paths of the network have rank {every:,}"
        idle = int((~vectors.any(0)).sum())
        if exhaustive and idle:
            # the outputs read only a part of what these weights lead to, for instance one token of
            # several
            words += (
                f", and {idle:,} of the {vectors.shape[1]:,} weights are on none of them: the model"
                " computes values from these and drops them"
            )
        holds, rank, of = holds and every == wanted, every, "rank of paths of the network"
    return {"holds": holds, "evidence": words, "matrix": of}, rank
