"""Two spanning trees of the reduction graph, with one entering and one leaving edge for each unit.

The paper's Skeleton Method marks one entering and one leaving weight of every hidden node;
the *skeleton* is their union. Here they are kept apart: the entering edges form a tree
``T_in`` from the root, the leaving edges a tree ``T_out`` to the root, and both together give
basis paths of any graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..graph.spanning_tree import SpanningTree
from ..graph.structure import Structure


@dataclass(frozen=True, eq=False)
class TwoTrees:
    """The two trees, their masks, chains and products.

    Attributes:
        graph: the reduction graph.
        tree_in: ``T_in``, one entering edge per unit.
        tree_out: ``T_out``, one leaving edge per unit.
        rule: the rule that chose them.
        seed: its seed.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(2, 3, bias=False), ReLU(), Linear(3, 2, bias=False))
        >>> skeleton = ps.trace(model, torch.randn(1, 2)).skeleton()
        >>> skeleton.incoming["0.weight"].int().tolist()  # M[j][j % n_in] = 1, Algorithm 1
        [[1, 0], [0, 1], [1, 0]]
        >>> skeleton.outgoing["2.weight"].int().tolist()  # M[j % n_out][j] = 1
        [[1, 0, 1], [0, 1, 0]]
    """

    graph: Structure
    tree_in: SpanningTree
    tree_out: SpanningTree
    rule: str
    seed: int

    @cached_property
    def dead(self) -> np.ndarray:
        """Ids of the units that only weights of 0 connect to the root: their paths are 0."""
        return np.flatnonzero(self.tree_in.dead | self.tree_out.dead)

    @cached_property
    def live(self) -> Self:
        """The skeleton without its dead units, which nothing changes."""
        if not len(self.dead):
            return self
        units = self.tree_in.dead | self.tree_out.dead
        tree_in = self.tree_in.without(units)
        tree_out = tree_in if self.tree_out is self.tree_in else self.tree_out.without(units)
        return replace(self, tree_in=tree_in, tree_out=tree_out)

    @cached_property
    def lost(self) -> np.ndarray:
        """Mask of the ids, derived ones included, that depend on the scale of a dead unit."""
        lost: np.ndarray = abs(self.graph.expand) @ (self.tree_in.dead | self.tree_out.dead) > 0
        return lost

    def positions(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Flat positions of the edges of ``T_in`` and of ``T_out`` in a parameter."""
        number, one, other = self.graph.index[name], self.tree_in, self.tree_out
        return one.index[one.block == number], other.index[other.block == number]

    def edges(self, *trees: SpanningTree) -> np.ndarray:
        """Numbers of the edges of trees, by default of either one, increasing."""
        numbers = (
            self.graph.edge_numbers(block, tree.index[units])
            for tree in trees or (self.tree_in, self.tree_out)
            for block, units in tree.by_block()
        )
        return np.unique(np.concatenate([np.zeros(0, np.int64), *numbers]))

    def mask(self, name: str, *parts: np.ndarray) -> Tensor:
        """The mask of a parameter at the given flat positions, by default those of both trees."""
        mask = torch.zeros(self.graph.blocks[self.graph.index[name]].shape, dtype=torch.bool)
        for part in parts or self.positions(name):
            mask.view(-1)[torch.from_numpy(part)] = True
        return mask

    def _masks(self, sides: slice) -> dict[str, Tensor]:
        names = [block.name for block in self.graph.blocks]
        return {name: self.mask(name, *self.positions(name)[sides]) for name in names}

    @cached_property
    def incoming(self) -> dict[str, Tensor]:
        """Parameter name -> mask of the edges of ``T_in``."""
        return self._masks(slice(0, 1))

    @cached_property
    def outgoing(self) -> dict[str, Tensor]:
        """Parameter name -> mask of the edges of ``T_out``."""
        return self._masks(slice(1, 2))

    @cached_property
    def masks(self) -> dict[str, Tensor]:
        """Parameter name -> mask of all skeleton edges, the paper's ``M``."""
        return self._masks(slice(0, 2))

    @cached_property
    def shared(self) -> np.ndarray:
        """Units whose entering edge is also in ``T_out``."""
        trees = self.tree_in, self.tree_out
        keys, others = (tree.block * (1 << 40) + tree.index for tree in trees)
        return np.flatnonzero(np.isin(keys, others[1:]) & (np.arange(len(keys)) > 0))

    @cached_property
    def _chains(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number and sign of every unit's chain, and the units that the chains begin with."""
        tree, graph = self.tree_in, self.graph
        # where one tree serves both directions there are no p_v
        rounds = [] if graph.forms.shape[0] else tree.rounds
        first = np.zeros(graph.expand.shape[0], np.int64)
        signs = np.ones(len(first), np.int64)
        joined = np.isin(np.arange(len(first)), self.shared)
        for units in rounds:
            # p_v = +-p_parent for every edge in both trees
            parents, same = tree.parent[units], joined[units]
            sign = tree.own[units] * tree.other[units] * signs[parents]
            first[units] = np.where(same, first[parents], units)
            signs[units] = np.where(same, sign, 1)
        starts, number = np.unique(first, return_inverse=True)
        return number, signs, starts[1:]

    @property
    def chain(self) -> np.ndarray:
        """``k(v)``: units with edges in both trees between them share a ``p_k``; 0 for the root."""
        return self._chains[0]

    @property
    def chain_sign(self) -> np.ndarray:
        """The sign in ``p_v = +-p_k``."""
        return self._chains[1]

    @property
    def num_chains(self) -> int:
        """Number of distinct non-zero ``p_k``."""
        return len(self.representatives)

    @property
    def representatives(self) -> np.ndarray:
        """The unit with which each chain begins in ``T_in``, whose sign is +1."""
        return self._chains[2]

    def prefixes(self, weights: Tensor | None = None) -> Tensor:
        """``pre_v``: product of the weights along ``T_in`` from the root, float64 of shape
        ``(H + 1 + derived,)``; of given weights of its edges, ``(H + 1,)``, or the model's.
        """
        return self._along(self.tree_in, weights)

    def suffixes(self, weights: Tensor | None = None) -> Tensor:
        """``s_v``: product of the weights along ``T_out`` to the root, see :meth:`prefixes`."""
        products = self._along(self.tree_out, weights)
        return products.reciprocal() if self.graph.forms.shape[0] else products

    def _along(self, tree: SpanningTree, weights: Tensor | None) -> Tensor:
        values = tree.gather(self.graph) if weights is None else weights
        # (whole numbers that overflow stay odd, or even)
        negative = self._sums_along(tree, (values < 0).long().numpy())
        with np.errstate(over="ignore"):
            sizes = np.exp(self._sums_along(tree, values.abs().log().numpy()))
        return torch.from_numpy(sizes * np.where(negative % 2, -1.0, 1.0))

    def _sums_along(self, tree: SpanningTree, numbers: np.ndarray) -> np.ndarray:
        """Sums of numbers of the tree's edges, times their exponents, on the way to every id."""
        sums, expand = np.zeros_like(numbers), self.graph.expand
        for units in tree.rounds:
            own, both = tree.own[units], tree.own[units] * tree.other[units]
            step = np.where(tree.forward[units], own, -own)
            with np.errstate(invalid="ignore"):
                parents = both * (expand[tree.parent[units]] @ sums)
                sums[units] = step * numbers[units] + parents + tree.rest[units] @ sums
        every: np.ndarray = expand @ sums
        return every

    def log_prefixes(self, zeros: bool = False) -> np.ndarray:
        """``log |pre_v|`` for the root, every unit and every derived id, float64, finite where
        the products leave the floats; weights of 0 are refused, or have ``-inf`` with ``zeros``.
        """
        return self._logs_along(self.tree_in, zeros)

    def log_suffixes(self, zeros: bool = False) -> np.ndarray:
        """``log |suf_v|``, see :meth:`log_prefixes`."""
        every = self._logs_along(self.tree_out, zeros)
        # where products of scales make one tree serve both ways, the suffix is the prefix
        # walked back
        return -every if self.graph.forms.shape[0] else every

    def _logs_along(self, tree: SpanningTree, zeros: bool) -> np.ndarray:
        weights = tree.gather(self.graph)
        if not zeros and bool((weights == 0).any()):
            unit = int((weights == 0).nonzero()[0])
            name = self.graph.blocks[int(tree.block[unit])].name
            raise InputError(
                f"The skeleton weight of unit {unit}, entry {int(tree.index[unit])} of {name!r}, is"
                " zero, expected skeleton weights other than zero; choose the skeleton again from"
                " the current model (units that only weights of 0 connect are in skeleton.dead)."
            )
        return self._sums_along(tree, weights.abs().log().numpy())

    def signs(self) -> Tensor:
        """Signs of the ``T_out`` weights, +-1 of shape ``(num_units,)``, for Theorem 2."""
        return self.tree_out.gather(self.graph)[1:].sign()
