"""Conversion of ids on a view of a parameter to the parameter's own layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

Region = tuple[slice, ...]


def layout(
    view: Tensor, ids: Iterable[Tensor], shape: tuple[int, ...]
) -> tuple[Region, list[Tensor]] | None:
    """Rearrange ids on a strided view of a parameter to the parameter's own dimensions.

    Args:
        view: meta tensor with sizes, strides and offset of the view.
        ids: tensors with the view's number of dimensions; each size is 1 or that of the view.
        shape: shape of the parameter.

    Returns:
        The region of the parameter that the view covers, and each tensor of ids with the
        parameter's dimensions (each size is 1 or that of the region); ``None`` if the view does not
        consist of the parameter's dimensions.
    """
    tensors = list(ids)
    if (sizes := _kept(view, shape)) is not None:
        whole = tuple(slice(0, size, 1) for size in shape)
        return whole, [
            t.reshape([1 if dim is None else t.shape[dim] for dim in sizes]) for t in tensors
        ]
    start, parts, cut = _parts(view, shape)
    for dim, lengths in cut:
        tensors = [
            t.unflatten(dim, lengths) if t.shape[dim] > 1 else t.unsqueeze(dim) for t in tensors
        ]
    grouped = None if parts is None else _grouped(parts, start)
    if grouped is None:
        return None
    region, groups = grouped
    used = {part.dim for group in groups for part in group}
    rest = [dim for dim in range(tensors[0].dim()) if dim not in used]
    if any(tensor.shape[dim] > 1 for tensor in tensors for dim in rest):
        return None
    return region, [_laid_out(tensor, groups, rest) for tensor in tensors]


def _kept(view: Tensor, shape: tuple[int, ...]) -> list[int | None] | None:
    """If a view is the whole parameter up to dimensions of size 1: the view's dimension for
    each of the parameter's.
    """
    long = [dim for dim, size in enumerate(view.shape) if size > 1]
    if [view.shape[dim] for dim in long] != [size for size in shape if size > 1]:
        return None
    if view.storage_offset() or not view.is_contiguous():
        return None
    places = iter(long)
    return [next(places) if size > 1 else None for size in shape]


class _Part(NamedTuple):
    """A dimension of a view: its dimension of the parameter, its step there, its size,
    and its number in the view.
    """

    home: int
    step: int
    size: int
    dim: int


def _parts(
    view: Tensor, shape: tuple[int, ...]
) -> tuple[list[int], list[_Part] | None, list[tuple[int, tuple[int, int]]]]:
    """The dimensions of a view as parts of the parameter's dimensions.

    Returns:
        The start of the view; its parts, or ``None`` if it does not consist of the parameter's
        dimensions; and ``(dim, sizes)`` for each flattened dimension that is split.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = view.storage_offset()
    start = [offset // stride % size for size, stride in zip(shape, strides, strict=True)]
    parts: list[_Part] = []
    cut: list[tuple[int, tuple[int, int]]] = []
    dim = 0
    pending = list(zip(view.shape, view.stride(), strict=True))
    while pending:
        size, stride = pending.pop(0)
        if size > 1:
            home = next(
                (d for d in range(len(shape)) if strides[d] <= stride < strides[d] * shape[d]), None
            )
            if home is None or stride % strides[home]:
                return start, None, cut
            step = stride // strides[home]
            room = (shape[home] - start[home] - 1) // step + 1
            if size > room:
                # a flattened dimension: split it at the end of the parameter's dimension
                if start[home] or step != 1 or size % room:
                    return start, None, cut
                pending = [(size // room, stride * room), (room, stride), *pending]
                cut.append((dim, (size // room, room)))
                continue
            parts.append(_Part(home, step, size, dim))
        dim += 1
    return start, parts, cut


def _grouped(parts: list[_Part], start: list[int]) -> tuple[Region, list[list[_Part]]] | None:
    """The region that a view covers, and its parts for each dimension of the
    parameter, outer ones first.
    """
    region: list[slice] = []
    groups: list[list[_Part]] = []
    for home, first in enumerate(start):
        mine = sorted((part for part in parts if part.home == home), key=lambda part: -part.step)
        if any(outer.step != inner.step * inner.size for outer, inner in pairwise(mine)):
            return None
        step = mine[-1].step if mine else 1
        length = math.prod(part.size for part in mine) * step
        region.append(slice(first, first + length - step + 1, step))
        groups.append(mine)
    return tuple(region), groups


def _laid_out(tensor: Tensor, groups: list[list[_Part]], rest: list[int]) -> Tensor:
    """A tensor of ids, rearranged to the parameter's dimensions."""
    tensor = tensor.permute([part.dim for group in groups for part in group] + rest)
    for position, group in enumerate(groups):
        end = position + len(group)
        if len(group) == 0:
            tensor = tensor.unsqueeze(position)
        elif len(group) > 1:
            if any(n > 1 for n in tensor.shape[position:end]):
                sizes = [part.size for part in group]
                tensor = tensor.expand([*tensor.shape[:position], *sizes, *tensor.shape[end:]])
            tensor = tensor.flatten(position, end - 1)
    return tensor.reshape(tensor.shape[: len(groups)])
