"""Index vectors of the values that a step needs from every tensor, computed once.

The values by unit of all tensors are concatenated, so that a step works on a few long vectors
instead of several short ones per tensor: the tails of the edges (one per column of a matrix or of
a kernel), the heads (one per row), and the edges on the trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from pathspace.paths.skeleton import Skeleton

from .tensors import Factors, Indices, PathTensor, Place, Spread, factor_type, local

NONE = np.zeros(0, np.int64)


def tree_edges(skeleton: Skeleton, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Flat positions of a tensor's edges that are in ``T_in`` alone, and of those in ``T_out``."""
    outer = np.unique(skeleton.tree_out.index[skeleton.tree_out.block == block])
    return np.setdiff1d(skeleton.tree_in.index[skeleton.tree_in.block == block], outer), outer


def ids_at(ids: Tensor, flat: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Ids at flat positions of a shape to which they broadcast."""
    if not shape:
        return ids.reshape(1).expand(len(flat)).numpy()
    index = np.unravel_index(flat, shape)
    return ids.numpy()[tuple(np.where(n > 1, i, 0) for i, n in zip(index, ids.shape, strict=True))]


def find_held(
    indices: Indices | None, shape: tuple[int, ...], flat: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The flat positions in a tensor that are on this device, and their
    positions in the local part.
    """
    if indices is None or not len(flat):
        return np.arange(len(flat)), flat
    places = []
    for index, held, size in zip(np.unravel_index(flat, shape), indices, shape, strict=True):
        place = np.full(size, -1)
        place[held] = np.arange(len(held))
        places.append(place[index])
    among = np.flatnonzero(np.min(places, axis=0) >= 0)
    if not len(among):
        return among, among
    return among, np.ravel_multi_index(
        [place[among] for place in places], [len(held) for held in indices]
    )


def held_chains(skeleton: Skeleton, chain: np.ndarray, frozen: Iterable[int]) -> np.ndarray:
    """Mask of the chains that are constant because of frozen blocks; the root's is never in it.

    The derivative with respect to the logarithm of ``p_k`` is a sum over the edges that a step on
    ``p_k`` changes: those of ``T_in`` alone that enter ``k``, and those outside ``T_out`` that
    leave it. If one of them is frozen, its term is unknown, and the step would change it.
    """
    count = chain.max() + 1
    edges, held = np.zeros(count, np.int64), np.zeros(count, bool)
    for number in frozen:
        block = skeleton.graph.blocks[number]
        inner, outer = tree_edges(skeleton, number)
        tails = chain[block.tail.abs().reshape(-1).numpy()]
        np.add.at(edges, tails, int(np.prod(block.shape, dtype=int)) // max(block.tail.numel(), 1))
        np.subtract.at(edges, chain[np.abs(ids_at(block.tail, outer, block.shape))], 1)
        held[chain[np.abs(ids_at(block.head, inner, block.shape))]] = True
    held |= edges > 0
    held[0] = False
    return held


class Layout:
    """Index vectors over all tensors, on the device of the weights.

    Products of weights along both trees stand in one table: those of ``T_in`` by id, those of
    ``T_out`` by id, then the reciprocals of both; ``[R, 1 / R]`` are the ratios of all chains and
    their reciprocals.

    Args:
        skeleton: the skeleton, without dead units.
        entries: the tensors; they are completed.
        spread: the parts of them on this device, and which of them this device counts.
        groups: number of parameter groups.
        cap: the bound of the multipliers, if there is one.

    Attributes:
        chain: the chain of every id.
        count: number of chains.
        chains: for each group, its chains.
        total: number of edges on the trees, on all devices.
        spans: block -> flat positions of its edges on the trees, and the number of those before.
        shared: positions of the edges on this device among all edges on the trees, and 1 for those
            that it counts; ``None`` without sharding.
        ends: memory for the edges on the trees of all devices (``tree``), and 1.
        inverse: memory for the reciprocals of the ends; ``both``, of ends and reciprocals.
        edges: for every product, the position there of its first factor.
        jumps: for every product, the product by which it is multiplied, once per doubling of the
            length; ``None``: the trees have products of scales, and are walked.
        factors: positions in the table of all factors by tail, then by head.
        representatives: those of one unit of each chain, along ``T_in``, then along ``T_out``.
        scale: these factors, in the types of the tensors.
        turns: positions in ``[R, 1 / R]`` of ``R_tail``, for all factors by tail.
        up: positions there of ``R_head``, for the edges on the trees on this device (the root's for
            constant weights); ``down``, those of ``1 / R_tail``.
        ratio: memory for ``R``.
        turned: the ratios by tail, in the types of the tensors.
        moved: the new weights on the trees, in the types of the tensors.
        target: the chain to which an entry contributes: first the sums by tail, then the edges.
        signs: sign of the contribution; 0 if another device counts it.
        given: memory for the contributions, where the reciprocals of the ends were before;
            ``given_edges``, those of the edges.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        entries: Sequence[PathTensor],
        spread: Spread,
        groups: int,
        cap: float | None,
    ) -> None:
        self.entries, self.skeleton = tuple(entries), skeleton
        self._device = local(entries[0].parameter).device if entries else torch.device("cpu")
        self.chain, representatives, self.chains = chains_by_group(skeleton, entries, groups)
        self.count = len(representatives)
        self.total = 0
        self.spans: dict[int, tuple[np.ndarray, int]] = {}
        # (a bound below 1 gives the root a factor of its own, too)
        rooted = cap is not None and cap < 1
        sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        sums = [NONE]
        edges: list[tuple[np.ndarray, ...]] = [(NONE,) * 5]
        standing: list[list[Place]] = []
        for entry, indices, counted in zip(entries, spread.indices, spread.counted, strict=True):
            ends, found = self._complete(entry, indices)
            standing.append([])
            for side, pieces in zip(ends, sides, strict=True):
                place: Place = None
                if bool(side.any()) or rooted:
                    # (a vector broadcasts to the rows of a matrix as it is)
                    row = side.ndim and side.numel() == side.shape[-1]
                    place = len(pieces), None if row else tuple(side.shape)
                    pieces.append(side.reshape(-1).numpy())
                standing[-1].append(place)
            if entry.sums:
                columns = ends[0] if entry.taps is None else ends[0].expand(entry.taps)
                sums.append(int(counted) * columns.reshape(-1).numpy())
            edges.append((*found, np.full(entry.count, int(counted))))
        self._create_views(standing, [[*map(len, pieces)] for pieces in sides])
        head, tail, toward, places, counts = map(np.concatenate, zip(*edges, strict=True))
        tails, heads = (np.concatenate([NONE, *pieces]) for pieces in sides)
        self.shared: tuple[Tensor, Tensor] | None = None
        if spread.groups:
            self.shared = self._put(places, np.int64), self._put(counts, np.float64)
        target = np.concatenate([*sums, toward])
        count = self.total + 1
        memory = self._put(np.ones(count + max(count, len(target))), np.float64)
        self.both, self.tree = memory[: 2 * count], memory[: count - 1]
        self.ends, self.inverse = self.both.chunk(2)
        self.given = memory[count : count + len(target)]
        self.given_edges = self.given[len(target) - len(counts) :]
        self._index_products()
        ids, both = len(skeleton.chain), np.concatenate([tails, heads])
        places = np.abs(both) + np.repeat([0, ids], [len(tails), len(heads)])
        places += np.where(both < 0, 2 * ids, 0)
        self.factors = self._put(places)
        self.representatives = self._put(np.concatenate([representatives, representatives + ids]))
        self.turns, self.up = self._ratios_of(tails, False), self._ratios_of(head, False)
        self.down = self._ratios_of(tail, True)
        self._ratios = self.ends.new_ones(2 * self.count)
        self.ratio, self._reciprocal = self._ratios.chunk(2)
        signs = np.where(target < 0, -1, 1) * skeleton.chain_sign[np.abs(target)]
        signs = signs * np.concatenate([np.full(len(target) - len(counts), -1), counts])
        self.target = self._put(self.chain[np.abs(target)])
        self.signs = self._put(signs, np.float32)

    def _create_views(self, standing: list[list[Place]], sizes: list[list[int]]) -> None:
        """Give every tensor its views of what a step computes."""
        tails, heads = sizes
        kinds = {factor_type(entry.parameter.dtype) for entry in self.entries}
        edges = [entry.count for entry in self.entries]
        self.scale = Factors([*tails, *heads], kinds, self._device)
        self.turned = Factors(tails, kinds, self._device)
        self.moved = Factors(edges, {entry.parameter.dtype for entry in self.entries}, self._device)
        for number, (entry, (tail, head)) in enumerate(zip(self.entries, standing, strict=True)):
            kind = factor_type(entry.parameter.dtype)
            entry.factors = self.scale.at(tail, kind)
            # (factors by head stand after those by tail)
            entry.factors += self.scale.at(head and (head[0] + len(tails), head[1]), kind)
            entry.turn = self.turned.at(tail, kind)[0] if entry.sums else None
            entry.tree = self.moved.at((number, None), entry.parameter.dtype)[0]

    def turn(self, here: Tensor) -> None:
        """Compute what moves the weights, from the ratios and the weights on the trees."""
        torch.reciprocal(self.ratio, out=self._reciprocal)
        self.turned.fill(self._ratios.index_select(0, self.turns))
        up, down = (self._ratios.index_select(0, places) for places in (self.up, self.down))
        self.moved.fill(up.mul_(down).mul_(here))

    def _put(self, array: np.ndarray, kind: type = np.int32) -> Tensor:
        return torch.from_numpy(np.asarray(array, kind)).to(self._device)

    def _ratios_of(self, ids: np.ndarray, divides: bool) -> Tensor:
        """Positions in ``[R, 1 / R]`` of the factors of ids, which are multiplied or divided by
        them.
        """
        against = np.where(ids < 0, -1, 1) * self.skeleton.chain_sign[np.abs(ids)] < 0
        return self._put(self.chain[np.abs(ids)] + self.count * (divides != against))

    def _complete(
        self, entry: PathTensor, indices: Indices | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[np.ndarray, ...]]:
        """Find what a step needs from one tensor.

        Returns:
            Its tails and heads; and of its edges on the trees the heads and tails of those that
            move (0 for constant ones), the units to whose chains they contribute, and their
            positions among all edges on the trees.
        """
        tensor, skeleton = local(entry.parameter), self.skeleton
        if entry.block is None:
            tail = head = torch.zeros([1] * tensor.ndim, dtype=torch.int64)
            shape, flat, inner, among = tuple(tensor.shape), NONE, NONE, NONE
        else:
            block = skeleton.graph.blocks[entry.block]
            tail, head, shape = block.tail, block.head, tuple(block.shape)
            inner, outer = tree_edges(skeleton, entry.block)
            every = np.concatenate([inner, outer])
            self.spans[entry.block] = every, self.total
            among, flat = find_held(indices, shape, every)
            for d, held in enumerate(indices or ()):
                tail, head = (
                    ids[(slice(None),) * d + (held,)] if ids.shape[d] > 1 else ids
                    for ids in (tail, head)
                )
            shape = shape if indices is None else tuple(map(len, indices))
        lost, chained = torch.from_numpy(skeleton.lost), torch.from_numpy(skeleton.chain != 0)
        dead = lost[tail.abs()] | lost[head.abs()]
        entry.dead = dead.to(tensor.device) if bool(dead.any()) else None
        found, columns = tail, (1, *shape[1:])
        if tail.ndim > 1 and tail.shape[0] == 1 and bool(tail.any()) and tail.shape != columns:
            entry.taps, found = columns, tail.expand(columns)
        if bool(chained[tail.abs()].any()):
            entry.reduced = tuple(d for d in range(len(shape)) if found.shape[d] == 1 != shape[d])
            entry.sums = found.numel()
        flat = np.asarray(flat, np.int64)
        entry.where, entry.count = torch.from_numpy(flat).to(tensor.device), len(flat)
        entry.nothing = tensor.detach().new_zeros(1).expand(entry.count)
        from_, to = ids_at(tail, flat, shape), ids_at(head, flat, shape)
        moves, places = among < len(inner), among + self.total
        self.total += 0 if entry.block is None else len(self.spans[entry.block][0])
        up, down = np.where(moves, to, 0), np.where(moves, from_, 0)
        return (tail, head), (up, down, np.where(moves, to, from_), places)

    def _index_products(self) -> None:
        """Find the first factors of all products along the trees, and the jumps."""
        trees, count = (self.skeleton.tree_in, self.skeleton.tree_out), len(self.skeleton.chain)
        # the position of every unit's edge among all edges; the last for none
        places = np.full((2, len(trees[0].block)), self.total)
        for tree, found in zip(trees, places, strict=True):
            for block, units in tree.by_block():
                flat, start = self.spans[block]
                order = np.argsort(flat)
                found[units] = start + order[np.searchsorted(flat, tree.index[units], sorter=order)]
        first = places.reshape(-1)
        self.jumps: list[Tensor] | None = None
        if not self.skeleton.graph.forms.shape[0]:
            power = np.concatenate([t.own * np.where(t.forward, 1, -1) for t in trees])
            power[[0, count]] = 1
            roots = np.repeat([0, count], count)
            inside = np.concatenate([t.block >= 0 for t in trees])
            against = np.concatenate([t.own * t.other < 0 for t in trees]) & inside
            parent = np.where(inside, np.concatenate([t.parent for t in trees]), 0) + roots
            # (against the sign of a unit, its product goes on with the reciprocal of the next)
            size, turn = 2 * count, self.total + 1
            first = np.concatenate([first + turn * (power < 0), first + turn * (power >= 0)])
            parent = np.concatenate([parent + size * against, parent + size * ~against])
            self.jumps = []
            while (parent % count).any():
                self.jumps.append(self._put(parent))
                parent = parent[parent]
        self.edges = self._put(first)


def chains_by_group(
    skeleton: Skeleton, entries: Sequence[PathTensor], groups: int
) -> tuple[np.ndarray, np.ndarray, tuple[slice, ...]]:
    """Number the chains so that those of a parameter group follow each other.

    A chain has the settings of the group of its first unit's entering edge.

    Returns:
        The chain of every id, the root's first; a unit of every chain; the chains of each group.
    """
    first = np.unique(skeleton.chain, return_index=True)[1]
    group_of = {entry.block: entry.group for entry in entries if entry.given}
    blocks = skeleton.tree_in.block[first].tolist()
    own = np.array([-2, *(group_of.get(block, -1) for block in blocks[1:])])
    order = np.argsort(own, kind="stable")
    starts = np.searchsorted(own[order], np.arange(groups + 1)).tolist()
    return np.argsort(order)[skeleton.chain], first[order], tuple(map(slice, starts, starts[1:]))
