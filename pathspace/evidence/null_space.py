"""Does a matrix have null vectors beside the known ones? Delete a pivot column for
each, and factorise the rest.

If ``B`` spans known null vectors of ``G`` and its rows ``S`` are invertible, then ``null(G) =
span(B)`` exactly where ``G`` without the columns ``S`` has full column rank: a null vector less a
combination of known ones is zero on ``S``.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import lapack, qr
from scipy.sparse import csr_array
from torch import Tensor

# what is left when rows with a single entry are used up is factorised
# densely, up to this many columns
MOST_DENSE = 4_000


def pivots(known: csr_array) -> np.ndarray:
    """Rows of a sparse matrix that are independent, as many as its rank.

    Args:
        known: columns that span the known null vectors.

    Returns:
        Row numbers, sorted.

    Raises:
        ValueError: more than 4,000 columns are linked by constraints with cycles.

    Example:
        >>> from scipy.sparse import csr_array
        >>> pivots(csr_array([[1, -1], [0, 1], [0, 2]])).tolist()
        [0, 1]
    """
    known = csr_array(known)
    pattern = csr_array((np.ones(known.nnz), known.indices, known.indptr), shape=known.shape)
    open_columns, open_rows = np.ones(known.shape[1]), np.ones(known.shape[0], bool)
    chosen: list[np.ndarray] = []
    while True:
        alone = np.flatnonzero((pattern @ open_columns == 1) & open_rows)
        if not len(alone):
            break
        column = np.rint(pattern @ (open_columns * np.arange(known.shape[1])))[alone].astype(
            np.int64
        )
        column, first = np.unique(column, return_index=True)
        chosen.append(alone[first])
        open_rows[alone[first]] = False
        open_columns[column] = 0
    columns = np.flatnonzero(open_columns)
    rest = known[:, columns]
    rows = np.flatnonzero(open_rows & (np.diff(csr_array(rest).indptr) > 0))
    if len(columns) and len(rows):
        if len(columns) > MOST_DENSE:
            raise ValueError(f"{len(columns):,} units are linked by constraints with cycles")
        dense = rest[rows].toarray().astype(np.float64)
        r, order = qr(dense.T, mode="r", pivoting=True)[-2:]
        diagonal = np.abs(np.diagonal(r))
        chosen.append(rows[order[: int((diagonal > 1e-9 * diagonal.max(initial=1e-300)).sum())]])
    return np.sort(np.concatenate([np.zeros(0, np.int64), *chosen]))


def smallest(
    matrix: Tensor, zero: float, seed: int = 0, block: int = 24, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """The smallest singular values of a square matrix, relative to the largest, and
    their right singular vectors.

    Block inverse iteration with an LU factorisation: ``n^3 2/3`` operations. More values are looked
    at while all are below ``zero``.

    Args:
        matrix: ``(n, n)``; it is changed a little (by 1e-11 of its size).
        zero: what counts as zero.
        seed: seed of the first vectors.
        block: how many values are checked first.
        most: how many at most; all of them by default.

    Returns:
        The values in ascending order, ``(k,)``, and the vectors, ``(n, k)``.

    Example:
        >>> import torch
        >>> values, vectors = smallest(
        ...     torch.diag(torch.tensor([3.0, 0.0, 2.0, 1.0]).double()), 1e-8
        ... )
        >>> int((values < 1e-8).sum()), vectors[:, 0].abs().round().tolist()
        (1, [0.0, 1.0, 0.0, 0.0])
    """
    size = len(matrix)
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, 1, generator=generator, dtype=torch.float64)
    for _ in range(20):
        vector = matrix.T @ (matrix @ (vector / vector.norm()))
    top = float(vector.norm().sqrt()) or 1.0
    # so that what is exactly singular can be divided by
    for part in matrix.split(1024):
        part += (
            1e-11
            * top
            / size**0.5
            * torch.randn(part.shape, generator=generator, dtype=torch.float64)
        )
    factors, order, _ = lapack.dgetrf(matrix.clone().numpy().T, overwrite_a=True)
    while True:
        count = min(block, size if most is None else most, size)
        basis = torch.linalg.qr(
            torch.randn(size, count, generator=generator, dtype=torch.float64)
        ).Q
        for _ in range(8):
            # (the factors are those of the transpose)
            half = lapack.dgetrs(factors, order, basis.numpy())[0]
            whole = torch.from_numpy(
                np.ascontiguousarray(lapack.dgetrs(factors, order, half, trans=1)[0])
            )
            whole = torch.nan_to_num(whole, posinf=1e300, neginf=-1e300)
            basis = torch.linalg.qr(whole).Q
        _, values, inner = torch.linalg.svd(matrix @ basis, full_matrices=False)
        vectors, relative = basis @ inner.T.flip(1), values.flip(0) / top
        if count in (size, most) or bool((relative > zero).any()):
            return relative, vectors
        block *= 4
