"""Which numbers a step needs from every tensor, as index vectors made once.

Per-unit quantities of all tensors are laid end to end, so that a step works on a few long vectors instead of a few
short ones for every tensor: first the tails of the edges (one per column of a matrix, or channel of a kernel), then the
edges on the trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

from pathspace import Skeleton

DYNAMIC, STATIC, PLAIN = "dynamic", "static", "plain"


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor in a step.

    Attributes:
        order: dimensions by decreasing stride (channels-last weights are walked as they lie in memory), or ``None``.
        strides: the strides this was made for.
        view: shape in which the tensor is worked on: ``(rows, columns)`` where no tail depends on the row.
        tail: ids of the tails, broadcastable to ``view`` once they are spread over the taps.
        head: ids of the heads, broadcastable to ``view``.
        reduced: dimensions of ``view`` along which ``tail`` is constant.
        tree: flat positions (in ``view``) of the edges on the trees.
        kind: ``dynamic`` where path values of chains enter, ``static`` where the factors are constant, ``plain``
            where they are all 1 (both ends at the root, or outside path space).
        offset: flat position in the whole tensor of the first number held here (0 unless it is cut into shards).
        taps: columns that follow each other with the same tail, as the taps of a kernel do.
    """

    order: tuple[int, ...] | None
    strides: tuple[int, ...]
    view: tuple[int, ...]
    tail: Tensor
    head: Tensor
    reduced: tuple[int, ...]
    tree: Tensor
    kind: str
    offset: int = 0
    taps: int = 1

    @overload
    def spread(self, value: Tensor) -> Tensor: ...

    @overload
    def spread(self, value: None) -> None: ...

    def spread(self, value: Tensor | None) -> Tensor | None:
        """Numbers by tail, broadcastable to ``view``."""
        if value is None or self.taps == 1 or value.shape[1] == 1:
            return value
        return value.unsqueeze(2).expand(-1, -1, self.taps).reshape(1, -1)

    def gathered(self, value: Tensor) -> Tensor:
        """Numbers by column, summed over the taps."""
        return value if self.taps == 1 else value.view(-1, self.taps).sum(1)

    def shaped(self, value: Tensor) -> Tensor:
        """A tensor laid out like the parameter, seen as ``view`` (a view whenever memory allows)."""
        return (value if self.order is None else value.permute(self.order)).reshape(self.view)

    @property
    def by_rows(self) -> bool:
        """Whether the tensor can be worked on in groups of rows."""
        return len(self.view) == 2 and self.tail.shape[0] == 1


@dataclass(frozen=True, eq=False)
class Layout:
    """Index vectors over all tensors, on the device of the weights.

    ``target`` says to which chain an entry contributes: tails first (``tails`` of them), then the edges on the trees.
    ``source`` says where in ``[R, 1 / R]`` (ratios of all chains, then their reciprocals) the factor of an entry lies:
    ``1 / R_tail`` of the tails, then ``R_head`` and at last ``1 / R_tail`` of the edges on the trees (those in ``T_in``
    alone; the root's where a weight stays). The last are left out where all of them are the root's.

    Attributes:
        parts: one per tensor.
        tails: number of tail entries.
        spans: where each tensor's tails lie (``None``: it has none that move).
        trees: number of tree edges of each tensor.
        target: chain to which an entry contributes.
        signs: sign with which it does, or ``None`` when all are +1.
        source: positions in ``[R, 1 / R]``.
        first: the unit that represents each chain.
        count: number of chains, the root's included.
    """

    parts: tuple[Part, ...]
    tails: int
    spans: tuple[tuple[int, int] | None, ...]
    trees: tuple[int, ...]
    target: Tensor
    signs: Tensor | None
    source: Tensor
    first: Tensor
    count: int


def memory_order(parameter: Tensor) -> tuple[int, ...] | None:
    """Dimensions by decreasing stride, or ``None`` when that is their own order."""
    order = tuple(sorted(range(parameter.ndim), key=lambda d: (-parameter.stride()[d], d)))
    return None if parameter.is_contiguous() or order == tuple(range(parameter.ndim)) else order


def plain_part(parameter: Tensor) -> Part:
    """A tensor outside path space."""
    ids = torch.zeros([1] * parameter.ndim, dtype=torch.int64)
    empty = torch.zeros(0, dtype=torch.int64, device=parameter.device)
    return Part(None, parameter.stride(), tuple(parameter.shape), ids, ids, (), empty, PLAIN)


def make_part(
    skeleton: Skeleton, block: int, parameter: Tensor, rows: tuple[int, int] | None = None
) -> tuple[Part, np.ndarray, np.ndarray, np.ndarray]:
    """Lay out one tensor of path space.

    Args:
        skeleton: the skeleton.
        block: the block of the graph that the tensor is.
        parameter: the tensor, or the rows of it that are held here.
        rows: which rows those are.

    Returns:
        The part; head and tail ids of its tree edges (0 for edges of ``T_out``, which stay); ids of the units whose
        chains those edges contribute to.
    """
    entry = skeleton.graph.blocks[block]
    order = memory_order(parameter)
    tail, head, whole, offset = entry.tail, entry.head, tuple(entry.shape), 0
    outer = np.unique(skeleton.tree_out.index[skeleton.tree_out.block == block])
    inner = np.setdiff1d(skeleton.tree_in.index[skeleton.tree_in.block == block], outer)
    if rows is not None and whole:
        first, after = rows
        tail, head = (ids[first:after] if ids.shape[0] > 1 else ids for ids in (tail, head))
        width = int(np.prod(whole[1:], dtype=int))
        whole, offset = (after - first, *whole[1:]), first * width
        outer, inner = (flat[(flat >= offset) & (flat < after * width)] - offset for flat in (outer, inner))
    tail, head = (ids if order is None else ids.permute(order) for ids in (tail, head))
    shape = whole if order is None else tuple(whole[d] for d in order)
    taps = 1
    if len(shape) and tail.shape[0] == 1:
        # rows and columns: a row of numbers in memory has one tail each
        rest = int(np.prod(shape[1:], dtype=int))
        last = max((d + 1 for d in range(1, len(shape)) if tail.shape[d] > 1), default=1)
        taps = max(1, int(np.prod(shape[last:], dtype=int)))
        tail = tail.expand(1, *shape[1:last], *[1] * (len(shape) - last)).reshape(1, -1)
        across = max(head.shape[1:], default=1) > 1
        head = head.expand(-1, *shape[1:]).reshape(head.shape[0], rest) if across else head.reshape(-1, 1)
        view: tuple[int, ...] = (shape[0], rest)
        reduced: tuple[int, ...] = (0,)
    else:
        view, reduced = shape, tuple(d for d in range(len(shape)) if tail.shape[d] == 1 and shape[d] > 1)
    flat = np.concatenate([inner, outer])
    if order is not None:
        index = np.unravel_index(flat, whole)
        flat = np.ravel_multi_index([index[d] for d in order], shape) if len(flat) else flat
    place = torch.from_numpy(flat.astype(np.int64))

    def at(ids: Tensor, taps: int = 1) -> np.ndarray:
        index = np.unravel_index(flat, view) if len(view) else ()
        index = (*index[:-1], index[-1] // taps) if taps > 1 else index
        chosen = tuple(torch.from_numpy(np.where(n > 1, i, 0)) for i, n in zip(index, ids.shape, strict=True))
        return (ids[chosen] if chosen else ids.reshape(1).expand(len(flat))).numpy()

    moves = np.arange(len(flat)) < len(inner)
    tree_tail, tree_head = at(tail, taps), at(head)
    chained = bool((torch.from_numpy(skeleton.chain)[tail.abs()] != 0).any())
    rooted = not bool((tail != 0).any()) and not bool((head != 0).any())
    kind = DYNAMIC if chained else PLAIN if rooted else STATIC
    part = Part(order, parameter.stride(), view, tail, head, reduced, place.to(parameter.device), kind, offset, taps)
    return part, np.where(moves, tree_head, 0), np.where(moves, tree_tail, 0), np.where(moves, tree_head, tree_tail)


def make_layout(
    skeleton: Skeleton,
    parameters: Sequence[Tensor],
    blocks: Sequence[int | None],
    rows: Callable[[int], tuple[int, int]] | None = None,
) -> Layout:
    """Lay out all tensors of an optimizer.

    Args:
        skeleton: the skeleton.
        parameters: the tensors.
        blocks: the block of the graph that each of them is, ``None`` for those outside path space.
        rows: which rows are held here of a tensor of so many rows; all of them by default.
    """
    chain, sign = skeleton.chain, skeleton.chain_sign
    parts: list[Part] = []
    tails: list[np.ndarray] = []
    ends: list[list[np.ndarray]] = [[], [], []]
    spans: list[tuple[int, int] | None] = []
    trees, position = [], 0
    for parameter, block in zip(parameters, blocks, strict=True):
        if block is None:
            parts.append(plain_part(parameter))
            spans.append(None)
            trees.append(0)
            continue
        shape = skeleton.graph.blocks[block].shape
        held = rows(shape[0]) if rows is not None and shape and rows(shape[0]) != (0, shape[0]) else None
        part, *ids = make_part(skeleton, block, parameter, held)
        parts.append(part)
        trees.append(len(ids[0]))
        for side, values in zip(ends, ids, strict=True):
            side.append(values)
        span = None
        if part.kind == DYNAMIC:
            tails.append(part.tail.reshape(-1).numpy())
            span = (position, position + len(tails[-1]))
            position = span[1]
        spans.append(span)

    def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int64), *arrays])

    tail, head, other, toward = join(tails), *(join(side) for side in ends)
    if not chain[np.abs(other)].any():
        other = other[:0]
    source = np.concatenate([tail, head, other])
    against = np.where(source < 0, -1, 1) * sign[np.abs(source)] < 0
    divides = np.repeat([True, False, True], [len(tail), len(head), len(other)]) != against
    target = np.concatenate([tail, toward])
    signs = np.where(target < 0, -1, 1) * sign[np.abs(target)]
    first = np.unique(chain, return_index=True)[1]
    device = parameters[0].device if parameters else torch.device("cpu")

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Layout(
        parts=tuple(parts),
        tails=len(tail),
        spans=tuple(spans),
        trees=tuple(trees),
        target=put(chain[np.abs(target)].astype(np.int32)),
        signs=put(signs.astype(np.float64)) if (signs < 0).any() else None,
        source=put((chain[np.abs(source)] + len(first) * divides).astype(np.int32)),
        first=put(first.astype(np.int32)),
        count=len(first),
    )
