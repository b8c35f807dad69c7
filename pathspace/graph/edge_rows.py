"""The edges of a weight block in rows, one row for each position of the units that need an edge.

A block with ``n`` scalars has far fewer different ends: rows and columns whose ids are equal are
stored once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .parts import WeightBlock, idle


@dataclass(frozen=True)
class EdgeRows:
    """The edges of a block in rows, one for each of the ``near`` ids.

    Equal rows share one of ``far`` (``which``), and column dimensions along which the far ids are
    constant come first and repeat its columns (``repeats``). Each column has all taps, numbered
    with it. ``row_offset``, ``steps``, ``tap`` and ``order`` lead to flat positions.
    """

    near: np.ndarray
    far: np.ndarray
    dead: np.ndarray
    which: np.ndarray
    row_offset: np.ndarray
    steps: tuple[tuple[int, ...], tuple[int, ...]]
    repeats: int
    tap: int
    order: tuple[int, ...]
    shape: tuple[int, int, int]
    entering: bool

    def flat(self, position: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Flat positions of edges by their row, and the number of their column and tap."""
        sizes, strides = self.steps
        index = np.unravel_index(column, sizes) if sizes else ()
        return np.asarray(
            self.row_offset[position]
            + sum(i * step for i, step in zip(index, strides, strict=True))
        )


def edge_rows(block: WeightBlock, entering: bool) -> EdgeRows:
    """The rows of a block; the near side, which has them, is that of the heads if ``entering``."""
    near, far = (block.head, block.tail) if entering else (block.tail, block.head)
    dims, shape = range(len(block.shape)), block.shape
    varies = [any(table.shape[d] > 1 for table in (far, idle(block))) for d in dims]
    rows = [d for d in dims if near.shape[d] > 1]
    # by convention the first two dimensions of a weight are out and in; further
    # ones are taps of a kernel
    columns = [
        d for d in dims if d not in rows and (d < 2 or far.shape[d] > 1 or block.unused is not None)
    ]
    columns.sort(key=varies.__getitem__)
    taps = [d for d in dims if d not in rows and d not in columns]
    strides = [math.prod(shape[d + 1 :]) for d in dims]
    offset = np.zeros(1, np.int64)
    for d in rows:
        offset = (offset[:, None] + np.arange(shape[d])[None, :] * strides[d]).reshape(-1)
    own = [shape[d] if varies[d] else 1 for d in rows]
    which = np.broadcast_to(
        np.arange(math.prod(own)).reshape(own), [shape[d] for d in rows]
    ).reshape(-1)

    def matrix(table: Tensor) -> np.ndarray:
        wide = table.permute([*rows, *columns, *taps])
        wide = wide.expand(
            [*own, *(shape[d] if varies[d] else 1 for d in columns), *[1] * len(taps)]
        )
        return np.asarray(wide.reshape(math.prod(own), -1).numpy())

    sizes = [math.prod(shape[d] for d in group) for group in (rows, columns, taps)]
    return EdgeRows(
        near=near.permute([*rows, *columns, *taps]).reshape(-1).numpy(),
        far=matrix(far),
        dead=matrix(idle(block)),
        which=which,
        row_offset=offset,
        steps=(
            tuple(shape[d] for d in (*columns, *taps)),
            tuple(strides[d] for d in (*columns, *taps)),
        ),
        repeats=math.prod(shape[d] for d in columns if not varies[d]),
        # the middle tap: outer taps may read mostly padding
        tap=int(np.ravel_multi_index([shape[d] // 2 for d in taps], [shape[d] for d in taps]))
        if taps
        else 0,
        order=(*rows, *columns, *taps),
        shape=(sizes[0], sizes[1], sizes[2]),
        entering=entering,
    )
