"""Exact linear algebra over the integers: rank, inverse, and the textbook
elimination that checks both.
"""

from __future__ import annotations

from fractions import Fraction

import flint
import numpy as np


def exact_rank(matrix: np.ndarray) -> int:
    """Rank over the rationals of an integer matrix.

    `rank(A) = rank(A^T A)` over the rationals, and the Gram matrix is small
    however many rows `A` has.
    """
    rows = np.asarray(matrix, dtype=np.int64)
    if rows.size == 0:
        return 0
    rows = rows if rows.shape[0] > rows.shape[1] else rows.T
    # floating point multiplies faster, and exactly as long as no sum reaches 2^53
    if int(np.abs(rows).max()) ** 2 * len(rows) >= 2**53:
        raise ValueError("the entries are too large for an exact Gram matrix")
    gram = (rows.T.astype(np.float64) @ rows.astype(np.float64)).astype(np.int64)
    return int(flint.fmpz_mat(gram.tolist()).rank())


def fraction_rank(matrix: np.ndarray) -> int:
    """The same rank by schoolbook Gaussian elimination in fractions; for small matrices only."""
    rows = [[Fraction(int(entry)) for entry in row] for row in np.asarray(matrix)]
    rank = 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((r for r in range(rank, len(rows)) if rows[r][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for r in range(rank + 1, len(rows)):
            factor = rows[r][column] / rows[rank][column]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[rank], strict=True)]
        rank += 1
    return rank


def integer_inverse(matrix: np.ndarray) -> np.ndarray:
    """The inverse of a unimodular integer matrix; raises ValueError when the
    inverse is not integral.
    """
    square = np.asarray(matrix, dtype=np.int64)
    inverse = flint.fmpz_mat(square.tolist()).inv()
    table = inverse.tolist() if len(square) else []
    if any(entry.q != 1 for row in table for entry in row):
        raise ValueError("the matrix is not unimodular: its inverse has fractions")
    return np.array([[int(entry.p) for entry in row] for row in table], dtype=np.int64).reshape(
        square.shape
    )
