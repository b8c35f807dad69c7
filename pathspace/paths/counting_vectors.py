"""Counting vectors of basis paths as a sparse matrix, and the linear map from circulations to
their coefficients in the basis.

The walk of a unit is that of its parent and one edge, so that the rows of a tree follow by one
sparse product per round. An edge of ``T_in`` has the path ``P(e) = p_head``, an edge of ``T_out``
``P(e) = p_tail``.
"""

from __future__ import annotations

import flint
import numpy as np
from scipy.sparse import csr_array, eye_array, hstack, sparray, vstack

from ..errors import UnsupportedError
from ..graph.spanning_tree import SpanningTree
from ..graph.structure import Structure
from .two_trees import TwoTrees

MAX_ENTRIES = 200_000_000
PRIME = (1 << 61) - 1
WORD = 2**63


def _table(ids: np.ndarray, width: int) -> csr_array:
    """A row for each signed id, with its sign at its place."""
    return csr_array((np.sign(ids), (np.arange(len(ids)), np.abs(ids))), (len(ids), width))


def counting_matrix(skeleton: TwoTrees) -> csr_array:
    """Counting vectors of all basis paths, sparse ``int64`` of shape ``(m - H, m)``."""
    graph = skeleton.graph
    m, every = graph.num_weights, graph.expand.shape[0]
    if m > MAX_ENTRIES // 4:
        raise UnsupportedError(
            f"The counting matrix of {m:,} weights would be too large; use basis[i] for single"
            " paths, or the certificate for the whole."
        )
    prefix = _tree_matrix(graph, skeleton.tree_in)
    # the suffix walks against the tree where one tree serves both ways
    suffix = -prefix if graph.forms.shape[0] else _tree_matrix(graph, skeleton.tree_out)
    first = skeleton.representatives
    tails, heads = graph.ends()
    edges = np.setdiff1d(np.arange(m), skeleton.edges())
    before, after = _table(tails[edges], every) @ prefix, _table(heads[edges], every) @ suffix
    outside = before + eye_array(m, dtype=np.int64, format="csr")[edges] + after
    matrix = csr_array(vstack([prefix[first] + suffix[first], outside]))
    matrix.eliminate_zeros()
    return matrix


def _tree_matrix(graph: Structure, tree: SpanningTree) -> csr_array:
    count, m, expand = len(tree.block), graph.num_weights, graph.expand
    number = np.zeros(count, np.int64)
    for block, units in tree.by_block():
        number[units] = graph.edge_numbers(block, tree.index[units])
    result = csr_array((count, m), dtype=np.int64)
    for units in tree.rounds:
        own, both = tree.own[units], tree.own[units] * tree.other[units]
        signs = np.where(tree.forward[units], own, -own)
        step = csr_array((signs, (units, number[units])), (count, m))
        parents = csr_array((both, (units, tree.parent[units])), (count, expand.shape[0])) @ expand
        keep = csr_array((np.ones(len(units), np.int64), (units, units)), (count, count))
        result = result + step + whole_product(parents + keep @ tree.rest, result)
        if result.nnz > MAX_ENTRIES:
            raise UnsupportedError(
                f"The counting matrix needs more than {MAX_ENTRIES:,} entries; use basis[i] for"
                " single paths or the certificate for the whole."
            )
    return csr_array(whole_product(expand, result))


def coefficient_maps(skeleton: TwoTrees) -> tuple[csr_array, csr_array]:
    """Incidence ``(m, H + 1)`` and the map from circulations to coefficients ``(m, m - H)``.

    The coefficient of ``p_k`` collects the edges of the trees, as ``P(e)`` is ``p_head`` on
    ``T_in`` and ``p_tail`` on ``T_out``, less the flow through its units.
    """
    graph = skeleton.graph
    m, count, every = graph.num_weights, graph.num_units + 1, graph.expand.shape[0]
    tails, heads = graph.ends()
    into, out = (csr_array(_table(ids, every) @ graph.expand) for ids in (heads, tails))
    passed = np.zeros(m, np.int64)
    if skeleton.num_chains:
        # (an edge of both trees has one path)
        for tree, ids in ((skeleton.tree_out, tails), (skeleton.tree_in, heads)):
            numbers = skeleton.edges(tree)
            passed[numbers] = ids[numbers]
    by_unit = _table(passed, count) - into
    units = np.flatnonzero(skeleton.chain)
    ends = (units, skeleton.chain[units] - 1)
    to_chain = csr_array((skeleton.chain_sign[units], ends), (count, skeleton.num_chains))
    free = np.setdiff1d(np.arange(m), skeleton.edges())
    itself = eye_array(m, dtype=np.int64, format="csr")[free].T
    chains = csr_array(whole_product(by_unit, to_chain))
    return csr_array(into - out), csr_array(hstack([chains, itself]))


def whole_product(left: np.ndarray | sparray, right: np.ndarray | sparray) -> np.ndarray | sparray:
    """``left @ right`` of whole numbers; refused where one might not fit into 64 bits."""
    if left.size and right.size:
        sizes = abs(left.astype(np.float64)), abs(right.astype(np.float64))
        # the first bound takes no product
        if float(sizes[0].sum(1).max()) * float(sizes[1].max()) >= WORD / 2:
            largest = (sizes[0] @ sizes[1]).max()
            if float(largest) >= WORD * (1 - 1e-9):
                raise UnsupportedError(
                    "Paths pass a weight more than 2^63 times, too often for a matrix of 64-bit"
                    " integers; use basis[i], whose counts are Python integers."
                )
    return left @ right


def modular_rank(matrix: np.ndarray | sparray) -> int:
    """Rank over the field of ``2^61 - 1`` elements, never above that over the rationals."""
    dense = np.asarray(matrix.todense() if isinstance(matrix, sparray) else matrix)
    if 0 in dense.shape:
        return 0
    # numbers beyond 64 bits stay Python's own
    small = dense.astype(np.int64 if np.can_cast(dense.dtype, np.int64) else object) % PRIME
    return int(flint.nmod_mat(dense.shape[0], dense.shape[1], small.ravel().tolist(), PRIME).rank())
