"""Index vectors of the values that a step needs from every tensor, computed once.

The per-unit values of all tensors are concatenated, so that a step works on a few long vectors
instead of several short ones per tensor: first the tails of the edges (one per column of a matrix,
or channel of a kernel), then the edges on the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
import torch
from torch import Tensor

from pathspace.paths.skeleton import Skeleton

from .sharding import Indices, Spread

DYNAMIC, STATIC, PLAIN = "dynamic", "static", "plain"


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor in a step.

    Attributes:
        order: dimensions by decreasing stride (for channels-last weights), or
            ``None`` for their own order.
        view: shape of the tensor in a step: ``(rows, columns)`` if no tail depends on the row.
        tail: ids of the tails, which broadcast to ``view`` after repetition over the taps.
        head: ids of the heads, which broadcast to ``view``.
        reduced: dimensions of ``view`` along which ``tail`` is constant.
        tree: flat positions (in ``view``) of the edges on the trees.
        kind: ``dynamic`` if factors depend on path values of chains, ``static`` if they are
            constant, ``plain`` if they are all 1 (both ends at the root, or outside path space).
        span: positions of its tails among those of all tensors; ``None`` if none of them moves.
        edges: positions of its tree edges among those of all tensors.
        indices: indices by dimension of the part of the tensor on this device; ``None`` for all.
        among: the tensor's tree edges that are on this device.
        taps: number of consecutive columns with the same tail, such as the taps of a kernel.
    """

    order: tuple[int, ...] | None
    view: tuple[int, ...]
    tail: Tensor
    head: Tensor
    reduced: tuple[int, ...]
    tree: Tensor
    kind: str
    span: slice | None
    edges: slice
    indices: Indices | None = None
    among: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    taps: int = 1

    @overload
    def spread(self, value: Tensor) -> Tensor: ...

    @overload
    def spread(self, value: None) -> None: ...

    def spread(self, value: Tensor | None) -> Tensor | None:
        """Values by tail in a shape that broadcasts to ``view``."""
        if value is None or self.taps == 1 or value.shape[1] == 1:
            return value
        return value.unsqueeze(2).expand(-1, -1, self.taps).reshape(1, -1)

    def gathered(self, value: Tensor) -> Tensor:
        """Values by column, summed over the taps."""
        return value if self.taps == 1 else value.view(-1, self.taps).sum(1)

    def shaped(self, value: Tensor) -> Tensor:
        """A tensor in the layout of the parameter, in the shape ``view`` (without
        a copy if memory allows).
        """
        return (value if self.order is None else value.permute(self.order)).reshape(self.view)

    @property
    def by_rows(self) -> bool:
        """Whether the tensor can be processed in groups of rows."""
        return len(self.view) == 2 and self.tail.shape[0] == 1


@dataclass(frozen=True, eq=False)
class Layout:
    """Index vectors over all tensors, on the device of the weights.

    ``target`` has the chain to which an entry contributes, first for the ``tails`` tails, then for
    the edges on the trees. ``of_tails`` and ``of_edges`` have the positions of the entries' factors
    in ``[R, 1 / R]`` (ratios of all chains, then their reciprocals): ``1 / R_tail`` for the tails;
    ``R_head`` and then ``1 / R_tail`` for the edges on the trees (for those in ``T_in`` alone; the
    root's for constant weights). The last are left out if all are the root's.

    Attributes:
        parts: one per tensor.
        places: flat positions of all edges on the trees, concatenated; the parts have views of it.
        tails: number of tail entries.
        edges: number of tree edges.
        target: chain to which an entry contributes.
        signs: sign of the contribution, 0 if another device counts it, or ``None`` if all are +1.
        of_tails: positions in ``[R, 1 / R]`` of the factors of tails.
        of_edges: positions of the factors of tree edges.
        first: the unit that represents each chain.
        count: number of chains, the root's included.
    """

    parts: tuple[Part, ...]
    places: Tensor
    tails: int
    edges: int
    target: Tensor
    signs: Tensor | None
    of_tails: Tensor
    of_edges: Tensor
    first: Tensor
    count: int


def memory_order(parameter: Tensor) -> tuple[int, ...] | None:
    """Dimensions by decreasing stride, or ``None`` if this is their own order."""
    order = tuple(sorted(range(parameter.ndim), key=lambda d: (-parameter.stride()[d], d)))
    return None if parameter.is_contiguous() or order == tuple(range(parameter.ndim)) else order


def plain_part(parameter: Tensor, edges: slice) -> Part:
    """The part of a tensor outside path space."""
    ids = torch.zeros([1] * parameter.ndim, dtype=torch.int64)
    empty = torch.zeros(0, dtype=torch.int64, device=parameter.device)
    order = memory_order(parameter)
    view = tuple(parameter.shape[d] for d in order or range(parameter.ndim))
    return Part(order, view, ids, ids, (), empty, PLAIN, None, edges)


def _rows_and_columns(
    tail: Tensor, head: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, int]:
    """Ids of tails of shape ``(1, tails)`` and of heads of a tensor seen as
    a matrix; taps per tail.
    """
    last = max((d + 1 for d in range(1, len(shape)) if tail.shape[d] != 1), default=1)
    taps = max(1, int(np.prod(shape[last:], dtype=int)))
    tail = tail.expand(1, *shape[1:last], *[1] * (len(shape) - last)).reshape(1, -1)
    across = max(head.shape[1:], default=1) > 1
    rest = int(np.prod(shape[1:], dtype=int))
    return (
        tail,
        head.expand(-1, *shape[1:]).reshape(head.shape[0], rest) if across else head.reshape(-1, 1),
        taps,
    )


def tree_edges(skeleton: Skeleton, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Flat positions of a tensor's edges that are in ``T_in`` alone, and of those in ``T_out``."""
    outer = np.unique(skeleton.tree_out.index[skeleton.tree_out.block == block])
    return np.setdiff1d(skeleton.tree_in.index[skeleton.tree_in.block == block], outer), outer


def ratio_places(
    skeleton: Skeleton, count: int, ids: np.ndarray, divides: np.ndarray | bool
) -> np.ndarray:
    """Positions in ``[R, 1 / R]`` of the factors of ids, which are
    multiplied or divided by them.
    """
    against = np.where(ids < 0, -1, 1) * skeleton.chain_sign[np.abs(ids)] < 0
    return np.asarray(skeleton.chain[np.abs(ids)] + count * (divides != against), np.int32)


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


def make_part(
    skeleton: Skeleton,
    block: int,
    parameter: Tensor,
    indices: Indices | None,
    start: tuple[int, int],
) -> tuple[Part, np.ndarray, np.ndarray, np.ndarray]:
    """Create the part of one tensor of path space.

    Args:
        skeleton: the skeleton.
        block: position of the tensor's block in the graph.
        parameter: the tensor, or its part on this device.
        indices: indices of that part by dimension; ``None`` for all.
        start: number of tails and of tree edges before those of this tensor.

    Returns:
        The part; head and tail ids of its tree edges (0 for edges of ``T_out``, which are
        constant); ids of the units to whose chains these edges contribute.
    """
    entry = skeleton.graph.blocks[block]
    order = memory_order(parameter)
    tail, head, whole = entry.tail, entry.head, tuple(entry.shape)
    inner, outer = tree_edges(skeleton, block)
    among, flat = find_held(indices, whole, np.concatenate([inner, outer]))
    if indices is not None:
        for d, held in enumerate(indices):
            tail, head = (
                ids[(slice(None),) * d + (held,)] if ids.shape[d] > 1 else ids
                for ids in (tail, head)
            )
        whole = tuple(map(len, indices))
    tail, head = (ids if order is None else ids.permute(order) for ids in (tail, head))
    shape = view = whole if order is None else tuple(whole[d] for d in order)
    taps, reduced = 1, tuple(d for d in range(len(shape)) if tail.shape[d] == 1 and shape[d] > 1)
    if shape and tail.shape[0] == 1:
        # as a matrix: each row is contiguous in memory, and each column has one tail
        tail, head, taps = _rows_and_columns(tail, head, shape)
        view, reduced = (shape[0], int(np.prod(shape[1:], dtype=int))), (0,)
    if order is not None and len(flat):
        index = np.unravel_index(flat, whole)
        flat = np.ravel_multi_index([index[d] for d in order], shape)
    flat = flat.astype(np.int64)
    units = [ids_at(tail, flat, view, taps), ids_at(head, flat, view)]
    chained = bool((torch.from_numpy(skeleton.chain)[tail.abs()] != 0).any())
    rooted = not bool((tail != 0).any()) and not bool((head != 0).any())
    kind = DYNAMIC if chained else PLAIN if rooted else STATIC
    span = slice(start[0], start[0] + tail.numel()) if chained else None
    edges = slice(start[1], start[1] + len(flat))
    place = torch.from_numpy(flat).to(parameter.device)
    part = Part(order, view, tail, head, reduced, place, kind, span, edges, indices, among, taps)
    moves = among < len(inner)
    return (
        part,
        np.where(moves, units[1], 0),
        np.where(moves, units[0], 0),
        np.where(moves, units[1], units[0]),
    )


def ids_at(ids: Tensor, flat: np.ndarray, view: tuple[int, ...], taps: int = 1) -> np.ndarray:
    """Ids at flat positions of a view to which they broadcast after repetition over the taps."""
    if not view:
        return ids.reshape(1).expand(len(flat)).numpy()
    index = np.unravel_index(flat, view)
    index = (*index[:-1], index[-1] // taps)
    return ids.numpy()[tuple(np.where(n > 1, i, 0) for i, n in zip(index, ids.shape, strict=True))]


def make_layout(
    skeleton: Skeleton,
    parameters: Sequence[Tensor],
    blocks: Sequence[int | None],
    spread: Spread,
    index: torch.dtype = torch.int64,
) -> Layout:
    """Create the layout of all tensors of an optimizer.

    Args:
        skeleton: the skeleton.
        parameters: the tensors.
        blocks: positions of their blocks in the graph, ``None`` for tensors outside path space.
        spread: the parts of them on this device, and which of them this device counts.
        index: type of positions; operations on whole tensors need int64, kernels int32.
    """
    chain, sign = skeleton.chain, skeleton.chain_sign
    parts: list[Part] = []
    none = np.zeros(0, np.int64)
    found: list[tuple[np.ndarray, ...]] = [(none, none, none, none)]
    tails = edges = 0
    counted: tuple[list[np.ndarray], list[np.ndarray]] = ([none], [none])
    for parameter, block, indices, counts in zip(
        parameters, blocks, spread.indices, spread.counted, strict=True
    ):
        if block is None:
            parts.append(plain_part(parameter, slice(edges, edges)))
            continue
        part, *ends = make_part(skeleton, block, parameter, indices, (tails, edges))
        parts.append(part)
        found.append((part.tail.reshape(-1).numpy() if part.span is not None else none, *ends))
        tails, edges = tails + len(found[-1][0]), part.edges.stop
        for side, ids in zip(counted, found[-1], strict=False):
            side.append(np.full(len(ids), int(counts)))
    tail, head, other, toward = (np.concatenate(side) for side in zip(*found, strict=True))
    if not chain[np.abs(other)].any():
        other = none
    target = np.concatenate([tail, toward])
    # parts on several devices are counted by one of them
    signs = (
        np.where(target < 0, -1, 1) * sign[np.abs(target)] * np.concatenate(counted[0] + counted[1])
    )
    first = np.unique(chain, return_index=True)[1]
    device = parameters[0].device if parameters else torch.device("cpu")

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    places = torch.cat([put(none), *(part.tree for part in parts if len(part.tree))]).to(index)
    sides = [(tail, True), (head, False), (other, True)]
    of_tails, *of_edges = (
        ratio_places(skeleton, len(first), ids, divides) for ids, divides in sides
    )
    return Layout(
        parts=tuple(replace(part, tree=places[part.edges]) for part in parts),
        places=places,
        tails=tails,
        edges=edges,
        target=put(chain[np.abs(target)].astype(np.int32)),
        signs=put(signs.astype(np.float64)) if (signs < 1).any() else None,
        of_tails=put(of_tails),
        of_edges=put(np.concatenate(of_edges)),
        first=put(first.astype(np.int32)),
        count=len(first),
    )
