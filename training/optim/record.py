"""Factors by tail and weights on the trees for saved states, in an order that
depends only on the skeleton.

A step stores them in the memory order of a device's tensors. A state must be readable with another
number of devices, so it has one factor per tail of the graph and all edges on the trees. For
unsharded tensors the record is filled when a state is requested. For sharded tensors a device knows
only its own part, and saving must not wait for the others; so each device updates the whole record
in every step, by the ratios that all devices know.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pathspace.paths.skeleton import Skeleton

from .layout import Layout, ids_at, ratio_places, tree_edges
from .vectors import Vectors


class Record:
    """The part of a state for tails and for edges on the trees.

    Args:
        skeleton: the skeleton.
        blocks: the block of each tensor, ``None`` outside path space.
        vectors: the vectors in the memory order of the tensors.
        carried: whether every step updates the record, too.

    Attributes:
        ids: the tails of the graph.
        factor: ``1 / pre`` of the tails to the power in the step, shape ``(len(ids),)``.
        tree: weights on the trees, block by block, in float64.
        spans: the range of each block in ``tree``.
    """

    def __init__(
        self, skeleton: Skeleton, blocks: Sequence[int | None], vectors: Vectors, carried: bool
    ) -> None:
        layout: Layout = vectors.layout
        none = np.zeros(0, np.int64)
        self.vectors, self.carried, device = vectors, carried, vectors.value.device
        tails = [np.unique(block.tail.numpy()) for block in skeleton.graph.blocks]
        self.ids = np.unique(np.concatenate([none, *tails]))
        edges = [np.concatenate(tree_edges(skeleton, number)) for number in range(len(tails))]
        ends = np.cumsum([0, *map(len, edges)]).tolist()
        self.spans = [slice(start, end) for start, end in pairwise(ends)]
        here = [part.tail.reshape(-1).numpy() for part in layout.parts if part.span is not None]
        among = [
            part.among + ends[b]
            for part, b in zip(layout.parts, blocks, strict=True)
            if b is not None
        ]

        def put(*arrays: np.ndarray) -> Tensor:
            return torch.from_numpy(np.concatenate([none, *arrays])).to(device)

        self._tails, self._edges = (
            put(np.searchsorted(self.ids, np.concatenate([none, *here]))),
            put(*among),
        )
        self.factor = torch.ones(len(self.ids), dtype=torch.float64, device=device)
        self.tree = torch.ones(ends[-1], dtype=torch.float64, device=device)
        if carried:
            self._of_ids = put(ratio_places(skeleton, layout.count, self.ids, True))
            self._of_edges = put(*self._followed(skeleton, layout.count, edges)).view(2, -1)
            self._units = [self._found(skeleton, edges, tree_in) for tree_in in (True, False)]

    @staticmethod
    def _followed(skeleton: Skeleton, count: int, edges: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Positions of the factors of all tree edges: first those at the heads, then
        the divisors at the tails.
        """
        heads, tails = [], []
        for number, (block, flat) in enumerate(zip(skeleton.graph.blocks, edges, strict=True)):
            moves = np.arange(len(flat)) < len(tree_edges(skeleton, number)[0])
            heads.append(np.where(moves, ids_at(block.head, flat, block.shape), 0))
            tails.append(np.where(moves, ids_at(block.tail, flat, block.shape), 0))
        sides = ((heads, False), (tails, True))
        return [
            ratio_places(skeleton, count, ids, divides) for some, divides in sides for ids in some
        ]

    def _found(
        self, skeleton: Skeleton, edges: Sequence[np.ndarray], tree_in: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The units with an edge in a tree, and the position of this edge."""
        tree = skeleton.tree_in if tree_in else skeleton.tree_out
        places = np.full(len(tree.block), -1)
        for block, units in tree.by_block():
            order = np.argsort(edges[block])
            found = order[np.searchsorted(edges[block], tree.index[units], sorter=order)]
            places[units] = self.spans[block].start + found
        units = np.flatnonzero(places >= 0)
        return units, places[units]

    def start(self, factor: Tensor, tables: Sequence[Tensor]) -> None:
        """Set the initial values.

        Args:
            factor: factors by tail.
            tables: by unit, the weight of its edge in ``T_in`` and in ``T_out``.
        """
        self.factor.copy_(factor)
        for (units, places), table in zip(self._units, tables, strict=True):
            self.tree[torch.from_numpy(places)] = table[torch.from_numpy(units)].to(self.tree)

    def follow(self, ratios: Tensor, linear: bool) -> None:
        """Apply the ratios of a step.

        Args:
            ratios: ratios of all chains, then their reciprocals.
            linear: whether the step has ``1 / pre`` instead of its square.
        """
        keep = ratios.index_select(0, self._of_ids)
        for _ in range(1 if linear else 2):
            self.factor.mul_(keep)
        for places in self._of_edges:
            self.tree.mul_(ratios.index_select(0, places))

    def fill(self) -> None:
        """Copy the values from the vectors to the record."""
        if not self.carried:
            self.factor[self._tails] = self.vectors.factor
            self.tree[self._edges] = self.vectors.kept.tree

    def hand_out(self) -> None:
        """Copy the values from the record to the vectors."""
        self.vectors.factor.copy_(self.factor[self._tails])
        self.vectors.kept.tree.copy_(self.tree[self._edges])


__all__ = ["Record"]
