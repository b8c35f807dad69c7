"""Two spanning trees of the reduction graph: which edge enters each unit first, and which leaves it last.

The paper's Skeleton Method marks, for every hidden node, one entering and one leaving weight and takes the union of
the marks as *skeleton*. Kept apart, the entering edges form a tree ``T_in`` rooted at the root and the leaving edges
a tree ``T_out`` towards it, and basis paths follow for any graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from pathspace.errors import InputError

if TYPE_CHECKING:
    from pathspace.basis import BasisPaths
    from pathspace.reduction import ReductionGraph

RULES = ("modulo", "magnitude", "random")


@dataclass(frozen=True, eq=False)
class Tree:
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

    def without(self, units: np.ndarray) -> Tree:
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

    def gather(self, graph: ReductionGraph) -> Tensor:
        """Weights of the tree's edges, float64, shape ``(H + 1,)``; 1 for the root."""
        result = torch.ones(len(self.block), dtype=torch.float64)
        for block, units in self.by_block():
            flat = graph.parameters[graph.blocks[block].name].detach().reshape(-1)
            chosen = flat[torch.from_numpy(self.index[units])].double().cpu()
            result[torch.from_numpy(units)] = graph.blocks[block].values(chosen)
        return result

    def by_block(self) -> Iterator[tuple[int, np.ndarray]]:
        """Block indices with the units whose edge lies there."""
        for block in np.unique(self.block[self.block >= 0]):
            yield int(block), np.flatnonzero(self.block == block)


@dataclass(frozen=True, eq=False)
class Skeleton:
    """The two trees, and what follows from them at once.

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

    graph: ReductionGraph
    tree_in: Tree
    tree_out: Tree
    rule: str
    seed: int

    @cached_property
    def dead(self) -> np.ndarray:
        """Ids of the units that only weights of 0 connect to the root: every path value through them is 0."""
        return np.flatnonzero(self.tree_in.dead | self.tree_out.dead)

    @cached_property
    def live(self) -> Skeleton:
        """The skeleton without its dead units, which optimizers and canonical forms leave as they are."""
        if not len(self.dead):
            return self
        units = np.isin(np.arange(len(self.tree_in.block)), self.dead)
        tree_in = self.tree_in.without(units)
        tree_out = tree_in if self.tree_out is self.tree_in else self.tree_out.without(units)
        return Skeleton(self.graph, tree_in, tree_out, self.rule, self.seed)

    @cached_property
    def lost(self) -> np.ndarray:
        """Mask over all ids, derived ones included: those that depend on the scale of a dead unit."""
        mask = np.isin(np.arange(self.graph.num_units + 1), self.dead)
        lost: np.ndarray = abs(self.graph.expand) @ mask.astype(np.int64) > 0
        return lost

    @property
    def in_block(self) -> np.ndarray:
        """Block of each unit's entering edge."""
        return self.tree_in.block

    @property
    def in_index(self) -> np.ndarray:
        """Flat position of each unit's entering edge."""
        return self.tree_in.index

    @property
    def in_forward(self) -> np.ndarray:
        """Whether each unit's entering edge is walked forwards."""
        return self.tree_in.forward

    @property
    def out_block(self) -> np.ndarray:
        """Block of each unit's leaving edge."""
        return self.tree_out.block

    @property
    def out_index(self) -> np.ndarray:
        """Flat position of each unit's leaving edge."""
        return self.tree_out.index

    @property
    def out_forward(self) -> np.ndarray:
        """Whether each unit's leaving edge is walked forwards."""
        return self.tree_out.forward

    def _masks(self, *trees: Tree) -> dict[str, Tensor]:
        masks = {}
        for i, block in enumerate(self.graph.blocks):
            mask = torch.zeros(block.shape, dtype=torch.bool)
            for tree in trees:
                mask.view(-1)[torch.from_numpy(tree.index[tree.block == i])] = True
            masks[block.name] = mask
        return masks

    @cached_property
    def incoming(self) -> dict[str, Tensor]:
        """Parameter name -> mask of the edges of ``T_in``."""
        return self._masks(self.tree_in)

    @cached_property
    def outgoing(self) -> dict[str, Tensor]:
        """Parameter name -> mask of the edges of ``T_out``."""
        return self._masks(self.tree_out)

    @cached_property
    def masks(self) -> dict[str, Tensor]:
        """Parameter name -> mask of all skeleton edges, the paper's ``M``."""
        return self._masks(self.tree_in, self.tree_out)

    @cached_property
    def shared(self) -> np.ndarray:
        """Units whose entering edge also lies in ``T_out``."""
        key_in, key_out = (tree.block * (1 << 40) + tree.index for tree in (self.tree_in, self.tree_out))
        return np.flatnonzero(np.isin(key_in, key_out[1:]) & (np.arange(len(key_in)) > 0))

    @cached_property
    def _chains(self) -> tuple[np.ndarray, np.ndarray]:
        count = len(self.tree_in.block)
        if self.graph.forms.shape[0]:
            # one tree for both: every p vanishes
            every = self.graph.expand.shape[0]
            return np.zeros(every, np.int64), np.ones(every, np.int64)
        units = self.shared
        tree = self.tree_in
        sign = tree.own[units] * tree.other[units]
        # p_v = sign * p_parent over every edge in both trees; solved on the doubled graph as for scales
        ends = (
            np.concatenate([2 * units, 2 * units + 1, [0]]),
            np.concatenate([2 * tree.parent[units] + (sign < 0), 2 * tree.parent[units] + (sign > 0), [1]]),
        )
        matrix = coo_array((np.ones(len(ends[0]), bool), ends), shape=(2 * count, 2 * count))
        _, label = connected_components(matrix, directed=False)
        plus, minus = label[0::2], label[1::2]
        key = np.minimum(plus, minus)
        values, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty(len(values), np.int64)
        number[order] = np.arange(len(values))
        positive = plus[first] <= minus[first]
        # the first unit of a chain represents it, with sign +1
        signs = np.where((plus <= minus) == positive[inverse], 1, -1)
        return number[inverse], signs

    @property
    def chain(self) -> np.ndarray:
        """``k(v)``: units joined by edges in both trees share one basis path ``p_k``; 0 for the root's (``p = 0``)."""
        return self._chains[0]

    @property
    def chain_sign(self) -> np.ndarray:
        """Sign with which ``p_v`` equals ``p_k``."""
        return self._chains[1]

    @property
    def num_chains(self) -> int:
        """Number of distinct non-zero ``p_k``."""
        return int(self.chain.max(initial=0))

    def prefixes(self, weights: Tensor | None = None) -> Tensor:
        """``pre_v``: product of the weights along ``T_in`` from the root, shape ``(H + 1 + derived,)``.

        Args:
            weights: weights of the tree's edges, ``(H + 1,)``; the model's own by default.
        """
        values = self.tree_in.gather(self.graph) if weights is None else weights
        return self._along(self.tree_in, values, entering=True)

    def suffixes(self, weights: Tensor | None = None) -> Tensor:
        """``s_v``: product of the weights along ``T_out`` to the root, shape ``(H + 1 + derived,)``."""
        values = self.tree_out.gather(self.graph) if weights is None else weights
        return self._along(self.tree_out, values, entering=False)

    def _along(self, tree: Tree, values: Tensor, entering: bool) -> Tensor:
        if self.graph.forms.shape[0]:
            products = self._along_products(tree, values)
            return products if entering else products.reciprocal()
        result = torch.ones_like(values)
        for units_ in tree.rounds:
            units = torch.from_numpy(units_)
            own, other = (torch.from_numpy(sign[units_]).to(values) for sign in (tree.own, tree.other))
            step = torch.where(torch.from_numpy(tree.forward[units_]), values[units], values[units].reciprocal())
            # entering forwards: phi_v = own (log w + other phi_parent), and the three other cases alike
            result[units] = step.pow(own) * result[torch.from_numpy(tree.parent[units_])].pow(own * other)
        return result

    def _along_products(self, tree: Tree, values: Tensor) -> Tensor:
        """Where ids may be products of scales: by logarithm and sign, for units and derived ids."""
        expand = self.graph.expand
        size, negative = values.abs().log().numpy(), (values < 0).numpy().astype(np.int64)
        log = np.zeros(self.graph.num_units + 1)
        odd = np.zeros(self.graph.num_units + 1, np.int64)
        for units in tree.rounds:
            own, both = tree.own[units], tree.own[units] * tree.other[units]
            step = np.where(tree.forward[units], own, -own)
            parents, rest = expand[tree.parent[units]], tree.rest[units]
            log[units] = step * size[units] + both * (parents @ log) + rest @ log
            odd[units] = (negative[units] + abs(parents) @ odd + abs(rest) @ odd) % 2
        log, odd = expand @ log, abs(expand) @ odd
        return torch.from_numpy(np.exp(log) * np.where(odd % 2, -1.0, 1.0))

    def basis(self) -> BasisPaths:
        """The basis paths of the two trees."""
        from pathspace.basis import BasisPaths

        return BasisPaths(self)

    def signs(self) -> Tensor:
        """Signs of the ``T_out`` weights (what Theorem 2 needs besides path values), +-1, shape ``(num_units,)``."""
        return self.tree_out.gather(self.graph)[1:].sign()


def choose(graph: ReductionGraph, rule: str = "modulo", seed: int = 0) -> Skeleton:
    """Choose the skeleton of a reduction graph.

    Args:
        graph: the reduction graph.
        rule: ``"modulo"`` (Algorithm 1 of the path-space paper, extended to any graph: the j-th unit takes the ``j
            mod n``-th open edge), ``"magnitude"`` (the largest weight: the best conditioned choice) or ``"random"``.
            Sizes are compared in a gauge that all rescaled copies of a network share, so these get the same trees.
            Edges of weight 0 are taken last, those of frozen weights first.
        seed: seed of the random rule.

    Returns:
        The skeleton.

    Raises:
        InputError: unknown rule.
    """
    if rule not in RULES:
        raise InputError(f"skeleton found rule={rule!r}, expected one of {', '.join(map(repr, RULES))}.")
    from pathspace.trees import Grower

    tree_in = Grower(graph, True, rule, seed).grow()
    # products of scales have no leaving edge of their own: one tree then serves both ways, and all p_v vanish
    tree_out = tree_in if graph.forms.shape[0] else Grower(graph, False, rule, seed).grow()
    return Skeleton(graph, tree_in, tree_out, rule, seed)


def warn_of_dead(owner: str, skeleton: Skeleton) -> None:
    """Say which units are left out because only weights of 0 connect them.

    Args:
        owner: who leaves them out.
        skeleton: the skeleton.
    """
    dead = skeleton.dead
    if not len(dead):
        return
    touched = [
        block.name
        for block in skeleton.graph.blocks
        if any(np.isin(np.abs(ids.numpy()), dead).any() for ids in (block.head, block.tail))
    ]
    warnings.warn(
        f"{owner} leaves {len(dead)} of {skeleton.graph.num_units} units as they are, because only weights of 0 "
        f"connect them to the rest: see skeleton.dead; they lie in {', '.join(touched[:3])}"
        f"{' and others' * (len(touched) > 3)}.",
        stacklevel=3,
    )
