"""A spanning tree of a reduction graph, as arrays over units."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from torch import Tensor

from ..models.values import require_values
from .parts import signed_rows
from .structure import Structure


def changes(graph: Structure, tails: np.ndarray, heads: np.ndarray) -> csr_array:
    """How the log-scales of the units move the logarithms of edges: a row for each edge."""
    change = csr_array(signed_rows(graph.expand, heads) - signed_rows(graph.expand, tails))
    change.eliminate_zeros()
    return change


def single(change: csr_array, reached: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Units that alone are missing in a row, and move it once: row and entry of each."""
    open_ = (~reached).astype(np.int64)
    own, some = change @ open_, (change != 0).astype(np.int64)
    good = np.flatnonzero((some @ open_ == 1) & (np.abs(own) == 1))
    units, first = np.unique(some[good] @ (open_ * np.arange(len(reached))), return_index=True)
    return units, good[first], own[good[first]]


def other_factors(units: np.ndarray, rows: csr_array, own: np.ndarray) -> csr_array:
    """``phi_v = c (row phi - others)``: ``-c`` times these, for entries ``own`` of ``units``."""
    count, places = rows.shape[1], np.arange(len(units))
    alone = coo_array((own, (places, units)), shape=(len(units), count)).tocsr()
    spread = coo_array((-own, (units, places)), shape=(count, len(units))).tocsr()
    return csr_array(spread @ (rows - alone))


class SpanningTree:
    """A spanning tree: for every unit the edge that connects it, and its parent; arrays of length
    ``H + 1``, the root first.
    """

    def __init__(self, count: int) -> None:
        """A tree of the root alone, for so many units, the root included."""
        # the weight block of each unit's edge, and the edge's flat position in the tensor
        self.block = np.full(count, -1, np.int64)
        self.index = np.full(count, -1, np.int64)
        # whether paths follow the edge in its direction (otherwise its exponent is -1)
        self.forward = np.zeros(count, bool)
        # the unit (or root) at the edge's other end
        self.parent = np.zeros(count, np.int64)
        # signs of both log-scales in that of the edge (-1 only if opposite scales are related)
        self.own = np.ones(count, np.int64)
        self.other = np.ones(count, np.int64)
        # the units in an order in which each follows its parent
        self.rounds: list[np.ndarray] = []
        # exponents of the other factors, if an end of an edge is a product of scales
        self.rest = csr_array((count, count), dtype=np.int64)
        # the units that only weights of 0 connect to the root
        self.dead = np.zeros(count, bool)

    def without(self, units: np.ndarray) -> SpanningTree:
        """The tree without units and all their descendants, which have the value 1."""
        tree = SpanningTree(len(self.block))
        for name in ("block", "index", "parent", "own", "other"):
            getattr(tree, name)[~units] = getattr(self, name)[~units]
        tree.forward, tree.dead = self.forward, self.dead
        tree.rounds = [some[~units[some]] for some in self.rounds]
        tree.rest = csr_array(self.rest.multiply((~units).astype(np.int64)[:, None]))
        return tree

    def gather(self, graph: Structure) -> Tensor:
        """Weights of the tree's edges, float64, shape ``(H + 1,)``; 1 for the root."""
        result = torch.ones(len(self.block), dtype=torch.float64)
        for block, units in self.by_block():
            entry = graph.blocks[block]
            flat = graph.parameters[entry.name].detach().reshape(-1)
            require_values("a computation with weights", [(entry.name, flat)])
            result[torch.from_numpy(units)] = entry.values(
                flat[torch.from_numpy(self.index[units])].double().cpu()
            )
        return result

    def by_block(self) -> Iterator[tuple[int, np.ndarray]]:
        """Block indices, each with the units whose edge is in that block."""
        for block in np.unique(self.block[self.block >= 0]):
            yield int(block), np.flatnonzero(self.block == block)
