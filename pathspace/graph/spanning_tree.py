"""A spanning tree of a reduction graph, as arrays over units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, eq=False)
class SpanningTree:
    """A spanning tree: for every unit the edge that connects it, and its parent.

    Attributes:
        block: index of the weight block of each unit's edge, ``int64`` of length ``H + 1``
            (entry 0, the root, is -1).
        index: flat position of the edge in the block's tensor.
        forward: whether paths follow the edge in its direction (otherwise its exponent is -1).
        parent: the unit (or root) at the edge's other end.
        own: sign of the unit's log-scale in that of the edge (-1 only if
            opposite scales are related).
        other: sign of the parent's log-scale.
        rounds: the units in an order in which each follows its parent.
        rest: exponents ``(H + 1, H + 1)`` of the other factors, if an end of an
            edge is a product of scales.
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

    @classmethod
    def without_edges(cls, count: int) -> SpanningTree:
        """A tree of the root alone, for so many units, the root included."""
        return cls(
            block=np.full(count, -1, np.int64),
            index=np.full(count, -1, np.int64),
            forward=np.zeros(count, bool),
            parent=np.zeros(count, np.int64),
            own=np.ones(count, np.int64),
            other=np.ones(count, np.int64),
            rounds=(),
            rest=csr_array((count, count), dtype=np.int64),
            dead=np.zeros(count, bool),
        )

    def without(self, units: np.ndarray) -> SpanningTree:
        """The tree without units and all their descendants, which have the value 1."""
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
            result[torch.from_numpy(units)] = entry.values(
                flat[torch.from_numpy(self.index[units])].double().cpu()
            )
        return result

    def by_block(self) -> Iterator[tuple[int, np.ndarray]]:
        """Block indices, each with the units whose edge is in that block."""
        for block in np.unique(self.block[self.block >= 0]):
            yield int(block), np.flatnonzero(self.block == block)
