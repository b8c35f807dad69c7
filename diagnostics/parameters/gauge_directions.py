"""Rescaling directions of the parameters, and which of them the Jacobian confirms.

``dw_e = w_e (phi(head e) - phi(tail e))`` for every assignment of log-scales ``phi`` to units. A
direction is confirmed if its product with the Jacobian of the outputs is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.linalg import orth
from scipy.sparse import coo_array, csr_array, hstack
from scipy.sparse.csgraph import connected_components

from pathspace.reduction import ReductionGraph


def gauge_directions(graph: ReductionGraph, starts: Mapping[str, int], total: int) -> csr_array:
    """Tangents of the gauge orbits: column v is ``w_e (d phi(head e) - d phi(tail e)) / d phi(v)``.

    Args:
        graph: the reduction graph; its current weights are used.
        starts: parameter name -> position of its first scalar among all.
        total: number of scalars.

    Returns:
        Sparse matrix ``(total, num_units)``.
    """
    where, ends, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for block in graph.blocks:
        name = next((n for n in (block.name, *block.aliases) if n in starts), None)
        if name is None:
            continue
        weight = (
            block.values(graph.parameters[block.name].double()).cpu().reshape(-1).numpy().copy()
        )
        if block.unused is not None:
            weight[block.unused.expand(block.shape).reshape(-1).numpy()] = 0
        place = starts[name] + np.arange(len(weight))
        for ids, side in ((block.head, 1), (block.tail, -1)):
            flat = ids.expand(block.shape).reshape(-1).numpy()
            where.append(place)
            ends.append(np.abs(flat))
            values.append(weight * np.sign(flat) * side)
    count = graph.expand.shape[0]
    by_id = coo_array(
        (np.concatenate(values), (np.concatenate(where), np.concatenate(ends))),
        shape=(total, count),
    ).tocsr()
    return csr_array((by_id @ graph.expand)[:, 1:])


def confirmed(
    directions: csr_array,
    live: np.ndarray,
    lengths: np.ndarray,
    jacobian: np.ndarray,
    zero: float,
    notes: list[str],
) -> np.ndarray:
    """Orthonormal basis, in scaled live coordinates, of the gauge directions that
    do not change the outputs.
    """
    scaled = directions[live].toarray() * lengths[live][:, None]
    sizes = np.linalg.norm(scaled, axis=0)
    scaled = scaled[:, sizes > 0] / sizes[sizes > 0]
    if scaled.shape[1] == 0:
        return np.zeros((int(live.sum()), 0))
    basis = orth(scaled, rcond=1e-10)
    # with running statistics and epsilons of norms, some directions are no
    # symmetries of the parameters alone
    _, moved, turn = np.linalg.svd(jacobian @ basis, full_matrices=True)
    effect = np.concatenate([moved, np.zeros(turn.shape[0] - len(moved))])
    null = effect <= zero
    _note_broken(int((~null).sum()), float(effect.max(initial=0.0)), notes)
    return np.asarray(basis @ turn[null].T)


def _note_broken(count: int, effect: float, notes: list[str]) -> None:
    if count:
        those = "direction" if count == 1 else "directions"
        notes.append(
            f"Not counted: {count} rescaling {those} of the reduction graph that the Jacobian does"
            f" not confirm (the outputs change by {effect:.1e} at most, relatively); running"
            " statistics that do not follow, or an epsilon above zero, are the usual reasons."
        )


def random_combinations(directions: csr_array, width: int, seed: int) -> csr_array:
    """The directions, or ``width`` random combinations if there are more."""
    count = directions.shape[1]
    if count <= width:
        return directions
    return csr_array(directions @ hashing(count, width, seed))


def hashing(count: int, width: int, seed: int) -> csr_array:
    """A matrix ``(count, width)`` that adds each column, with a random sign, to a random one."""
    random = np.random.default_rng(seed)
    places = (np.arange(count), random.integers(0, width, count))
    signs = random.integers(0, 2, count) * 2.0 - 1
    return csr_array(coo_array((signs, places), shape=(count, width)))


def count_broken(
    tested: csr_array, moved: np.ndarray, lengths: np.ndarray, notes: list[str]
) -> int:
    """Number of independent directions that the Jacobian does not confirm: the rank
    of its product with them.
    """
    sizes = np.sqrt(tested.multiply(tested).T @ lengths**2)
    found = np.linalg.svd(moved[:, sizes > 0] / sizes[sizes > 0], compute_uv=False)
    broken = int((found > 1e-8 * max(1.0, found.max(initial=0.0))).sum())
    _note_broken(broken, float(found.max(initial=0.0)), notes)
    if broken and broken == len(moved):
        notes.append(
            "As many as there were combinations of outputs, so more may do so; raise max_rows."
        )
    return broken


def gauge_rank(graph: ReductionGraph, directions: csr_array, live: np.ndarray) -> int:
    """Rank of gauge directions on live parameters, from the components of their graph."""
    rows = csr_array(directions[live])
    if graph.forms.shape[0]:
        small = rows.shape[0] * rows.shape[1] < 5e7
        return int(np.linalg.matrix_rank(rows.toarray())) if small else graph.num_units
    # an edge to or from the root has one entry, an edge between two units has two
    root = csr_array((np.diff(rows.indptr) == 1)[:, None])
    ends = hstack([root, csr_array((np.ones(rows.nnz), rows.indices, rows.indptr), rows.shape)])
    return graph.num_units + 1 - int(connected_components(ends.T @ ends, directed=False)[0])
