"""A spanning tree of a reduction graph, as arrays over units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from pathspace.structure import Structure
from pathspace.without_values import require_values


@dataclass(frozen=True, eq=False)
class SpanningTree:
    """A spanning tree: for every unit ``v`` the edge that connects it, and the unit that edge leads to.

    Attributes:
        block: index of the weight block of each unit's edge, ``int64`` of length ``H + 1`` (entry 0, the root, is -1).
        index: flat position of the edge in the block's tensor.
        forward: whether the edge is walked in its own direction (otherwise it counts -1).
        parent: the unit (or root) at the edge's other end.
        own: sign with which the unit's scale enters the edge's logarithm (-1 only where opposite scales are related).
        other: sign of the parent's.
        rounds: the units in the order in which they can be computed from their parents.
        rest: where an end of an edge is a product of scales: exponents ``(H + 1, H + 1)`` of the other factors.
        dead: mask of the units that only weights of 0 connect to the root.
    """

    block: np.ndarray
    index: np.ndarray
    forward: np.ndarray
    parent: np.ndarray
    own: np.ndarray
    other: np.ndarray
    rounds: tuple[np.ndarray, ...]
    rest: csr_array
    dead: np.ndarray

    def without(self, units: np.ndarray) -> SpanningTree:
        """The tree with some units taken off: they have no edge, and values of 1.

        Args:
            units: mask, ``(H + 1,)``, with every unit whose walk passes one of them.
        """
        return replace(
            self,
            block=np.where(units, -1, self.block),
            index=np.where(units, -1, self.index),
            parent=np.where(units, 0, self.parent),
            own=np.where(units, 1, self.own),
            other=np.where(units, 1, self.other),
            rounds=tuple(some[~units[some]] for some in self.rounds),
            rest=csr_array(self.rest.multiply((~units).astype(np.int64)[:, None])),
        )

    def gather(self, graph: Structure) -> Tensor:
        """Weights of the tree's edges, float64, shape ``(H + 1,)``; 1 for the root."""
        result = torch.ones(len(self.block), dtype=torch.float64)
        for block, units in self.by_block():
            entry = graph.blocks[block]
            flat = graph.parameters[entry.name].detach().reshape(-1)
            require_values("a computation with weights", [(entry.name, flat)])
            result[torch.from_numpy(units)] = entry.values(flat[torch.from_numpy(self.index[units])].double().cpu())
        return result

    def by_block(self) -> Iterator[tuple[int, np.ndarray]]:
        """Block indices with the units whose edge lies there."""
        for block in np.unique(self.block[self.block >= 0]):
            yield int(block), np.flatnonzero(self.block == block)
