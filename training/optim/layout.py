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

from .tensors import Indices, Layout, PathTensor, Spread, local

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


def ratio_places(
    chain: np.ndarray, sign: np.ndarray, ids: np.ndarray, divides: np.ndarray | bool
) -> np.ndarray:
    """Positions in ``[R, 1 / R]`` of the factors of ids, which are
    multiplied or divided by them.
    """
    against = np.where(ids < 0, -1, 1) * sign[np.abs(ids)] < 0
    found: np.ndarray = chain[np.abs(ids)] + (chain.max() + 1) * (divides != against)
    return found


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
    """Mask of the chains that are constant because of frozen weights.

    The derivative with respect to the logarithm of ``p_k`` is a sum over the edges that a step on
    ``p_k`` changes: those of ``T_in`` alone that enter ``k``, and those outside ``T_out`` that
    leave it. If one of them is frozen, its term is unknown, and the step would change it.

    Args:
        skeleton: the skeleton.
        chain: the chain of every id.
        frozen: positions of the frozen blocks in the graph.

    Returns:
        A mask of the chains; the root's is never in it.
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


class _Builder:
    """Collects the index vectors of all tensors."""

    def __init__(self, skeleton: Skeleton, spread: Spread, rooted: bool) -> None:
        self.skeleton, self.rooted = skeleton, rooted
        self.spread = spread
        self.ids, self.units = len(skeleton.chain), len(skeleton.tree_in.block)
        self.tails: list[np.ndarray] = []
        self.heads: list[np.ndarray] = []
        self.sums: list[np.ndarray] = []
        # per tensor: ends of its edges that move (0 for constant ones), the units to whose
        # chains they contribute, and whether this device counts them
        self.edges: list[tuple[np.ndarray, ...]] = []
        # block -> flat positions of its tree edges and the number of those before
        self.spans: dict[int, tuple[np.ndarray, int]] = {}
        self.total = 0

    def add(self, entry: PathTensor, indices: Indices | None, counted: bool) -> None:
        """Find the index vectors of one tensor."""
        tensor = local(entry.parameter)
        if entry.block is None:
            tail = head = torch.zeros([1] * tensor.ndim, dtype=torch.int64)
            shape, flat, inner, among = tuple(tensor.shape), NONE, NONE, NONE
        else:
            block = self.skeleton.graph.blocks[entry.block]
            tail, head, shape = block.tail, block.head, tuple(block.shape)
            inner, outer = tree_edges(self.skeleton, entry.block)
            every = np.concatenate([inner, outer])
            self.spans[entry.block] = every, self.total
            among, flat = find_held(indices, shape, every)
            if indices is not None:
                for d, held in enumerate(indices):
                    tail, head = (
                        ids[(slice(None),) * d + (held,)] if ids.shape[d] > 1 else ids
                        for ids in (tail, head)
                    )
                shape = tuple(map(len, indices))
        lost = torch.from_numpy(self.skeleton.lost)
        dead = lost[tail.abs()] | lost[head.abs()]
        entry.dead = dead.to(tensor.device) if bool(dead.any()) else None
        if tail.ndim > 1 and tail.shape[0] == 1 and bool(tail.any()):
            # (one for each column of a matrix, so that inner loops run over rows, not taps)
            tail = tail.expand(1, *shape[1:])
        if bool(tail.any()) or self.rooted:
            entry.tails = self._place(self.tails, tail)
        if bool(head.any()) or self.rooted:
            entry.heads = self._place(self.heads, head)
        flat = np.asarray(flat, np.int64)
        ends = [ids_at(ids, flat, shape) for ids in (tail, head)]
        if bool((torch.from_numpy(self.skeleton.chain)[tail.abs()] != 0).any()):
            entry.reduced = tuple(d for d in range(len(shape)) if tail.shape[d] == 1 != shape[d])
            entry.sums = tail.numel()
            self.sums.append(np.where(counted, 1, 0) * tail.reshape(-1).numpy())
        entry.where = torch.from_numpy(flat).to(tensor.device)
        entry.count = len(flat)
        moves = among < len(inner)
        self.edges.append(
            (
                np.where(moves, ends[1], 0),
                np.where(moves, ends[0], 0),
                np.where(moves, ends[1], ends[0]),
                np.full(len(flat), int(counted)),
                among + self.total,
            )
        )
        self.total += len(self.spans[entry.block][0]) if entry.block is not None else 0

    @staticmethod
    def _place(found: list[np.ndarray], ids: Tensor) -> tuple[int, tuple[int, ...] | None]:
        found.append(ids.reshape(-1).numpy())
        # (a vector broadcasts to the rows of a matrix as it is)
        row = ids.ndim and ids.numel() == ids.shape[-1]
        return len(found) - 1, None if row else tuple(ids.shape)

    def positions(self) -> np.ndarray:
        """For both trees, the position of every unit's edge among all edges; the last for none."""
        places = np.full((2, self.units), self.total)
        for tree, found in zip(
            (self.skeleton.tree_in, self.skeleton.tree_out), places, strict=True
        ):
            for block, units in tree.by_block():
                flat, start = self.spans[block]
                order = np.argsort(flat)
                found[units] = start + order[np.searchsorted(flat, tree.index[units], sorter=order)]
        return places

    def products(self) -> tuple[np.ndarray, list[np.ndarray] | None, bool]:
        """The first factors of all products along the trees, and the jumps to the next ones."""
        trees, places = (self.skeleton.tree_in, self.skeleton.tree_out), self.positions()
        if self.skeleton.graph.forms.shape[0]:
            return places.reshape(-1), None, False
        ids = np.arange(self.ids)
        power = np.concatenate([t.own * np.where(t.forward, 1, -1) for t in trees])
        power[[0, self.ids]] = 1
        against = np.concatenate([t.own * t.other < 0 for t in trees])
        parent = np.concatenate([t.parent + n * self.ids for n, t in enumerate(trees)])
        for n, tree in enumerate(trees):
            parent[n * self.ids + ids[tree.block < 0]] = n * self.ids
            against[n * self.ids + ids[tree.block < 0]] = False
        size, both = len(parent), bool(against.any())
        first = places.reshape(-1) + np.where(power < 0, self.total + 1, 0)
        if both:
            other = places.reshape(-1) + np.where(power < 0, 0, self.total + 1)
            first = np.concatenate([first, other])
            parent = np.concatenate(
                [parent + np.where(against, size, 0), parent + np.where(against, 0, size)]
            )
        roots = np.isin(np.arange(len(parent)) % self.ids, 0)
        jumps = []
        while not roots[parent].all():
            jumps.append(parent)
            parent = parent[parent]
        return first, jumps, both


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


def make_layout(
    skeleton: Skeleton,
    entries: Sequence[PathTensor],
    spread: Spread,
    groups: int,
    cap: float | None,
) -> Layout:
    """Create the layout of all tensors of an optimizer.

    Args:
        skeleton: the skeleton, without dead units.
        entries: the tensors; they are completed.
        spread: the parts of them on this device, and which of them this device counts.
        groups: number of parameter groups.
        cap: the bound of the multipliers, if there is one.
    """
    # (a bound below 1 gives the root a factor of its own, too)
    build = _Builder(skeleton, spread, cap is not None and cap < 1)
    for entry, indices, counted in zip(entries, spread.indices, spread.counted, strict=True):
        build.add(entry, indices, counted)
    chain, representatives, chains = chains_by_group(skeleton, entries, groups)
    sign = skeleton.chain_sign
    device = local(entries[0].parameter).device if entries else torch.device("cpu")

    def put(array: np.ndarray, kind: type = np.int32) -> Tensor:
        return torch.from_numpy(np.asarray(array, kind)).to(device)

    def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([NONE, *parts])

    tails, heads, sums = joined(build.tails), joined(build.heads), joined(build.sums)
    ends = [joined(side) for side in zip(*build.edges, strict=True)] or [NONE] * 5
    head, tail, toward, counts, places = ends
    with_edges = [entry for entry in entries if entry.count]
    for number, entry in enumerate(with_edges):
        entry.edges = number
    for entry in entries:
        if entry.heads is not None:
            # (factors by head stand after those by tail)
            place, shape = entry.heads
            entry.heads = place + len(build.tails), shape
    first, jumps, both = build.products()
    reach = 2 * build.ids
    factors = joined(
        [
            np.abs(tails) + np.where(tails < 0, reach, 0),
            np.abs(heads) + build.ids + np.where(heads < 0, reach, 0),
            representatives,
            representatives + build.ids,
        ]
    )
    target = np.concatenate([sums, toward])
    signs = np.where(target < 0, -1, 1) * sign[np.abs(target)]
    signs = signs * np.concatenate([np.full(len(sums), -1), counts])
    turns = [
        ratio_places(chain, sign, ids, divides)
        for ids, divides in ((tails, False), (head, False), (tail, True))
    ]
    return Layout(
        entries=tuple(entries),
        one=put(np.ones(1), np.float64),
        edges=put(first),
        divides=bool((first > build.total).any()),
        jumps=None if jumps is None else tuple(put(jump) for jump in jumps),
        both=both,
        inverse=cap is not None or bool((factors >= reach).any()),
        factors=put(factors),
        parts=[len(tails) + len(heads), len(representatives), len(representatives)],
        sizes=[*map(len, build.tails), *map(len, build.heads)],
        tail_pieces=len(build.tails),
        edge_counts=[entry.count for entry in with_edges],
        turns=put(np.concatenate(turns)),
        turn_parts=[*map(len, turns)],
        target=put(chain[np.abs(target)]),
        signs=put(signs, np.int8),
        shared=(put(places, np.int64), put(counts, np.float64)) if spread.groups else None,
        total=build.total,
        chain=chain,
        chains=chains,
        spans={b: range(start, start + len(flat)) for b, (flat, start) in build.spans.items()},
    )


__all__ = ["held_chains", "ids_at", "make_layout", "tree_edges"]
