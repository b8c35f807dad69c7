"""The edges of a weight block in rows, one row for each position of the units that need an edge.

A block with ``n`` scalars has far fewer different ends: rows and columns whose ids are equal are
stored once.
"""

from __future__ import annotations

import math

import numpy as np

from .parts import WeightBlock, idle


class EdgeRows:
    """The edges of a block in rows, one for each of the ``near`` ids.

    Equal rows share one of ``far`` (``which``), and column dimensions along which the far ids are
    constant come first and repeat its columns (``repeats``). Each column has all taps, numbered
    with it. The tensor's dimensions in this ``order`` have ``sizes`` and ``strides``.
    """

    def __init__(self, block: WeightBlock, entering: bool) -> None:
        """The near side, which has rows, is that of the heads if ``entering``."""
        near, far = (block.head, block.tail) if entering else (block.tail, block.head)
        dims, shape, dead = range(len(block.shape)), block.shape, idle(block)
        varies = [far.shape[d] > 1 or dead.shape[d] > 1 for d in dims]
        rows = [d for d in dims if near.shape[d] > 1]
        # by convention the first two dimensions of a weight are out and in; further
        # ones are taps of a kernel
        wanted = (d for d in dims if d < 2 or far.shape[d] > 1 or block.unused is not None)
        columns = sorted((d for d in wanted if d not in rows), key=varies.__getitem__)
        taps = [d for d in dims if d not in rows and d not in columns]
        self.entering, self.order = entering, (*rows, *columns, *taps)
        self.sizes = [shape[d] for d in self.order]
        self.strides = [math.prod(shape[d + 1 :]) for d in self.order]
        parts = [[shape[d] for d in group] for group in (rows, columns, taps)]
        self.shape = (math.prod(parts[0]), math.prod(parts[1]), math.prod(parts[2]))
        # (outer taps may read mostly padding)
        self.tap = int(np.ravel_multi_index([n // 2 for n in parts[2]], parts[2])) if taps else 0
        self.repeats = math.prod(shape[d] for d in columns if not varies[d])
        wide = [shape[d] if varies[d] else 1 for d in self.order]
        own = wide[: len(rows)]
        self.which = np.broadcast_to(np.arange(math.prod(own)).reshape(own), parts[0]).reshape(-1)
        self.near = near.permute(self.order).reshape(-1).numpy()
        self.far, self.dead = (
            table.permute(self.order).expand(wide).reshape(math.prod(own), -1).numpy()
            for table in (far, dead)
        )

    def flat(self, position: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Flat positions of edges by their row, and the number of their column and tap."""
        place = position * (self.shape[1] * self.shape[2]) + column
        index = np.unravel_index(place, self.sizes) if self.sizes else ()
        return np.asarray(0 * place + sum(i * n for i, n in zip(index, self.strides, strict=True)))
