"""Elimination of variables from homogeneous linear equations with whole coefficients.

A model can have hundreds of thousands of products of activations. For example, ``k^T v`` of linear
attention has one scale for every pair of channels, ``phi(kv_ij) = phi(k_i) + phi(v_j)``, and ``q
(k^T v)`` imposes ``phi(o_j) = phi(q_i) + phi(kv_ij)``. Many variables are eliminated at once, those
in the fewest equations first. What then follows from other equations is mostly one of them again:
``phi(o_j) = phi(q_i) + phi(k_i) + phi(v_j)`` for all pairs, less that of one ``i``, says for every
``j`` that the sums ``phi(q_i) + phi(k_i)`` are equal. All steps are exact over the integers.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array, csr_array

# scales with higher powers are fixed; a product of two such powers fits into 64 bits
LARGEST_POWER = 2**31
# an elimination that may need more terms is not done
MOST_TERMS = 1 << 24
# eliminated variables, and for each a row with what it is in terms of the others
Round = tuple[np.ndarray, csr_array]


def reduced(matrix: csr_array) -> csr_array:
    """The distinct rows that are not zero, without common factors and up to their signs."""
    matrix.eliminate_zeros()
    matrix.sort_indices()
    matrix = csr_array(matrix[np.diff(matrix.indptr) > 0])
    if not matrix.shape[0]:
        return matrix
    starts = matrix.indptr[:-1]
    factor = np.gcd.reduceat(matrix.data, starts) * np.sign(matrix.data[starts])
    matrix.data //= np.repeat(factor, np.diff(matrix.indptr))
    return csr_array(matrix[first_alike(matrix) == np.arange(matrix.shape[0])])


def _factors(count: int) -> np.ndarray:
    """Random numbers; rows whose sums with them are equal, modulo ``2^64``, are mostly equal."""
    return np.random.default_rng(0).integers(2**62, size=count, dtype=np.int64) | 1


def first_alike(matrix: csr_array) -> np.ndarray:
    """For each row the number of an equal one, mostly the first."""
    sums = matrix @ _factors(matrix.shape[1])
    _, first, which = np.unique(sums, return_index=True, return_inverse=True)
    first = first[which]
    differ = csr_array(matrix - matrix[first])
    differ.eliminate_zeros()
    return np.where(np.diff(differ.indptr) > 0, np.arange(len(first)), first)


def row_differences(matrix: csr_array) -> csr_array:
    """Differences of rows that are alike but for one variable, which say that two are equal."""
    factors = _factors(matrix.shape[1] + 1)
    row, sign = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), np.sign(matrix.data)
    # the sums of rows without one entry, which is made positive
    rest = (matrix @ factors[:-1])[row] - matrix.data * factors[matrix.indices]
    rest = rest * sign + np.abs(matrix.data) * factors[-1]
    order = np.argsort(rest, kind="stable")
    near = np.flatnonzero(rest[order][1:] == rest[order][:-1])
    one, two = (
        csr_array(matrix[row[some]].multiply(sign[some][:, None]))
        for some in (order[near], order[near + 1])
    )
    return csr_array(one - two)


def scattered(rows: np.ndarray, count: int) -> csr_array:
    """The matrix that puts the first row of another one at ``rows[0]``, and so on."""
    places = rows, np.arange(len(rows))
    ones = np.ones(len(rows), np.int64)
    return csr_array(coo_array((ones, places), shape=(count, len(rows))))


def eliminated(matrix: csr_array) -> tuple[list[Round], csr_array]:
    """Variables in terms of others, round by round, and the equations that are left."""
    rounds = []
    while matrix.shape[0] and (found := _pivots(matrix)) is not None:
        rows, names, signs = found
        spread = scattered(names, matrix.shape[1])
        chosen = csr_array(matrix[rows].multiply(signs[:, None]))
        rounds.append((names, csr_array(spread.T - chosen)))
        matrix = reduced(csr_array(matrix - (matrix @ spread) @ chosen))
    return rounds, matrix


def _pivots(matrix: csr_array) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Rows, variables and coefficients (1 or -1) of a round; no row has another's variable."""
    size = np.diff(matrix.indptr)
    row, name = np.repeat(np.arange(len(size)), size), matrix.indices
    uses = np.bincount(name, minlength=matrix.shape[1])
    high = np.maximum.reduceat(np.abs(matrix.data), matrix.indptr[:-1])
    unit = np.abs(matrix.data) == 1
    # (no product may become too large)
    fits = unit & ((uses[name] == 1) | (high * int(high.max()) < LARGEST_POWER)[row])
    # first multiples of one other, then variables in few equations, mostly the last of one: where
    # tied layers follow each other, what enters the first one would otherwise be expressed by what
    # leaves it, and no edge of a skeleton could reach it alone
    last = np.maximum.reduceat(np.where(unit, name, 0), matrix.indptr[:-1])
    level = 2 * np.ceil(np.log2(uses[name])).astype(np.int64) + 3 * (name != last[row])
    level[size[row] == 2] = -1
    fits &= level == level[fits].min(initial=level.max())
    fits &= (uses[name] - 1) * size[row] < MOST_TERMS
    if not fits.any():
        return None
    # later variables are expressed by earlier ones, and by short equations
    entry = np.flatnonzero(fits)
    entry = entry[np.lexsort((size[row[entry]], -name[entry]))]
    for held in (name, row):
        entry = entry[np.sort(np.unique(held[entry], return_index=True)[1])]
    others = coo_array(matrix[row[entry]][:, name[entry]])
    turn = np.random.default_rng(0).permutation(len(entry))
    clash = (
        others.row[turn[others.row] > turn[others.col]],
        others.col[turn[others.col] > turn[others.row]],
    )
    entry = np.delete(entry, np.concatenate(clash))
    return row[entry], name[entry], matrix.data[entry]
