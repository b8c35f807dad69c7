"""Ids given on a view of a parameter, laid out like the parameter itself."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor

Region = tuple[slice, ...]


def layout(view: Tensor, ids: Iterable[Tensor], shape: tuple[int, ...]) -> tuple[Region, list[Tensor]] | None:
    """Rearrange ids given on a strided view of a parameter into the parameter's own dimensions.

    Args:
        view: meta tensor: sizes, strides and offset of the view.
        ids: tensors with the view's number of dimensions, each size 1 or the view's.
        shape: shape of the parameter.

    Returns:
        The region of the parameter that the view covers, and each ids tensor with one dimension per parameter dimension
        (size 1 or the region's); ``None`` if the view does not respect the dimensions.
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    offset = view.storage_offset()
    start = [offset // stride % size for size, stride in zip(shape, strides, strict=True)]
    tensors = list(ids)
    # each entry: parameter dimension, step within it, size, the ids' dimension
    parts: list[tuple[int, int, int, int]] = []
    dim = 0
    pending = [(size, stride) for size, stride in zip(view.shape, view.stride(), strict=True)]
    while pending:
        size, stride = pending.pop(0)
        if size > 1:
            home = next((d for d in range(len(shape)) if strides[d] <= stride < strides[d] * shape[d]), None)
            if home is None or stride % strides[home]:
                return None
            step = stride // strides[home]
            room = (shape[home] - start[home] - 1) // step + 1
            if size > room:
                # a flattened dimension: split it where the parameter's dimension ends
                if start[home] or step != 1 or size % room:
                    return None
                pending = [(size // room, stride * room), (room, stride), *pending]
                tensors = [
                    t.unflatten(dim, (size // room, room)) if t.shape[dim] > 1 else t.unsqueeze(dim) for t in tensors
                ]
                continue
            parts.append((home, step, size, dim))
        dim += 1
    region: list[slice] = []
    order: list[list[int]] = []
    sizes: list[list[int]] = []
    for home in range(len(shape)):
        mine = sorted((part for part in parts if part[0] == home), key=lambda part: -part[1])
        for outer, inner in pairwise(mine):
            if outer[1] != inner[1] * inner[2]:
                return None
        step, length = (mine[-1][1], 1) if mine else (1, 1)
        for part in mine:
            length *= part[2]
        region.append(slice(start[home], start[home] + (length - 1) * step + 1, step))
        order.append([part[3] for part in mine])
        sizes.append([part[2] for part in mine])
    used = {d for group in order for d in group}
    rest = [d for d in range(tensors[0].dim()) if d not in used]
    result = []
    for tensor in tensors:
        if any(tensor.shape[d] > 1 for d in rest):
            return None
        tensor = tensor.permute([d for group in order for d in group] + rest)
        for position, (group, lengths) in enumerate(zip(order, sizes, strict=True)):
            now = tensor.shape[position : position + len(group)]
            if len(group) == 0:
                tensor = tensor.unsqueeze(position)
            elif len(group) > 1 and all(n == 1 for n in now):
                tensor = tensor.flatten(position, position + len(group) - 1)
            elif len(group) > 1:
                wide = [*tensor.shape[:position], *lengths, *tensor.shape[position + len(group) :]]
                tensor = tensor.expand(wide).flatten(position, position + len(group) - 1)
        result.append(tensor.reshape(tensor.shape[: len(shape)]))
    return tuple(region), result
