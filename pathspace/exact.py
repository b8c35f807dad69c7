"""Exact ranks of integer matrices: proven lower bounds by one large prime."""

from __future__ import annotations

import numpy as np
from scipy.sparse import sparray

from pathspace.errors import UnsupportedError

PRIME = (1 << 61) - 1


def modular_rank(matrix: np.ndarray | sparray) -> int:
    """Rank of an integer matrix over the field with ``2^61 - 1`` elements: never above its rank over the rationals.

    Together with an upper bound that it meets, it is the exact rank.

    Args:
        matrix: integers, dense or sparse.

    Returns:
        The rank modulo the prime.

    Raises:
        UnsupportedError: python-flint is not installed.

    Example:
        >>> import numpy as np
        >>> modular_rank(np.array([[1, 1, 0], [0, 1, 1], [1, 2, 1]]))
        2
    """
    try:
        import flint
    except ImportError as error:
        raise UnsupportedError(
            "Exact ranks need python-flint; install it with: pip install 'pathspace[exact]'."
        ) from error
    dense = np.asarray(matrix.todense() if isinstance(matrix, sparray) else matrix)
    if 0 in dense.shape:
        return 0
    # numbers beyond 64 bits stay Python's own
    small = dense.astype(np.int64 if np.can_cast(dense.dtype, np.int64) else object) % PRIME
    return int(flint.nmod_mat(dense.shape[0], dense.shape[1], small.ravel().tolist(), PRIME).rank())
