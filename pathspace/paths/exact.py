"""Exact arithmetic of integer matrices: products that do not overflow, ranks as lower
bounds by one large prime.
"""

from __future__ import annotations

import flint
import numpy as np
from scipy.sparse import sparray

from ..errors import UnsupportedError

PRIME = (1 << 61) - 1
WORD = 2**63


def whole_product(left: np.ndarray | sparray, right: np.ndarray | sparray) -> np.ndarray | sparray:
    """``left @ right`` of whole numbers of 64 bits, each entry exact.

    Args:
        left: integers, shape ``(a, b)``, dense or sparse.
        right: integers, shape ``(b, c)``.

    Returns:
        The product, shape ``(a, c)``, ``int64``.

    Raises:
        UnsupportedError: an entry might not fit into 64 bits, where numpy and scipy would
            go on with a wrong number.

    Example:
        >>> import numpy as np
        >>> whole_product(np.array([[2**31]]), np.array([[2**31]]))
        array([[4611686018427387904]])
        >>> whole_product(np.array([[2**32]]), np.array([[2**32]]))
        Traceback (most recent call last):
        pathspace.errors.UnsupportedError: Paths pass a weight more than 2^63 times, too often for a matrix of ...
    """  # noqa: E501
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
    """Rank of an integer matrix over the field with ``2^61 - 1`` elements: never above its
    rank over the rationals.

    Together with an upper bound that it meets, it is the exact rank.

    Args:
        matrix: integers, dense or sparse.

    Returns:
        The rank modulo the prime.

    Example:
        >>> import numpy as np
        >>> modular_rank(np.array([[1, 1, 0], [0, 1, 1], [1, 2, 1]]))
        2
    """
    dense = np.asarray(matrix.todense() if isinstance(matrix, sparray) else matrix)
    if 0 in dense.shape:
        return 0
    # numbers beyond 64 bits stay Python's own
    small = dense.astype(np.int64 if np.can_cast(dense.dtype, np.int64) else object) % PRIME
    return int(flint.nmod_mat(dense.shape[0], dense.shape[1], small.ravel().tolist(), PRIME).rank())
