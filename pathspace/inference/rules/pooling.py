"""Windows, pooling and resampling of images: elements that are read together share one scale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import NEUTRAL, Value, along, compress
from .edges import arguments_of, with_positions


def per_dimension(value: int | Sequence[int], rank: int) -> list[int]:
    """A number or a list of numbers, one per spatial dimension."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * rank if len(numbers) == 1 else numbers


@cache
def _alike(size: int, count: int, taps: int, before: int, step: int, hole: int) -> bool:
    """Whether a margin tells no windows apart: all meet data, and common taps link them."""
    places = torch.arange(count).mul(step).unsqueeze(1) + torch.arange(taps).mul(hole) - before
    met = (places >= 0) & (places < size)
    if not bool(met.any(1).all()):
        return False
    linked, more = torch.zeros(taps, dtype=torch.bool), met[:1].any(0)
    while bool((more & ~linked).any()):
        linked = linked | more
        more = met[(met & linked).any(1)].any(0)
    return bool(linked.all())


def windows(
    semantics: Semantics,
    ids: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    margins: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    ceil: bool = False,
) -> Tensor:
    """Views of windows, ``(..., in...) -> (..., out..., kernel...)``; margins are zeros."""
    rank = len(kernel)
    lead = ids.dim() - rank
    for i in range(rank):
        dim = lead + i
        size, (before, after), step = ids.shape[dim], margins[i], stride[i]
        reach = dilation[i] * (kernel[i] - 1) + 1
        room = size + before + after - reach
        count = (room + (step - 1 if ceil else 0)) // step + 1
        # torch drops a last window that would start in the right margin
        if ceil and (count - 1) * step >= size + before:
            count -= 1
        extra = max(0, (count - 1) * step + reach - (size + before + after))
        padded = bool(before or after or extra)
        if ids.stride(dim) == 0 and (
            not padded
            or (semantics.uniform and _alike(size, count, kernel[i], before, step, dilation[i]))
        ):
            view = ids.narrow(dim, 0, 1).unsqueeze(-1)
            ids = view.expand(*ids.shape[:dim], count, *ids.shape[dim + 1 :], kernel[i])
            continue
        if padded:
            both = [0, 0] * (ids.dim() - 1 - dim) + [before, after + extra]
            ids = along(partial(torch.nn.functional.pad, pad=both, value=NEUTRAL), [dim], ids)
        ids = ids.unfold(dim, reach, step)[..., :: dilation[i]]
        ids = ids.narrow(dim, 0, count)
    return (
        compress(ids)
        if any(ids.stride(d) and ids.shape[d] > 1 for d in range(lead, ids.dim()))
        else ids
    )


# what is true of means over windows
AVERAGED: dict[str, Any] = {
    "kind": "average pooling", "degree": (1,), "linear": "jointly", "coefficients": "positive",
    "separable": True
}  # fmt: skip


@rule("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d", "aten.max_pool1d_with_indices",
      "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", kind="maximum pooling",
      degree=(1,), separable=True)  # fmt: skip
@rule("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", **AVERAGED)
def pool(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Mean or maximum over windows, and its position; margins are zero, or minus infinity."""
    rank = int(semantics.place.op.partition("_pool")[2][0])
    given = arguments_of(semantics, x, *args, **kwargs)
    kernel = per_dimension(given["kernel_size"], rank)
    stride = per_dimension(given.get("stride") or kernel, rank)
    margins = [(p, p) for p in per_dimension(given.get("padding", 0), rank)]
    ids, holes = semantics.activation(x), per_dimension(given.get("dilation", 1), rank)
    seen = windows(semantics, ids, kernel, stride, margins, holes, given.get("ceil_mode", False))
    found = semantics.reduce(seen, range(seen.dim() - rank, seen.dim()))
    return with_positions(semantics, found, found)


@rule("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d",
      **AVERAGED)  # fmt: skip
@rule("aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d",
      kind="maximum pooling", degree=(1,), separable=True)  # fmt: skip
def adaptive_pool(semantics: Semantics, x: Value, size: Any) -> Any:
    """Mean or maximum over windows that give a fixed output size."""
    ids = semantics.activation(x)
    rank = int(semantics.place.op[-2])
    wanted = per_dimension(size, rank)
    for i in range(rank):
        dim = ids.dim() - rank + i
        length, count = ids.shape[dim], wanted[i] if wanted[i] is not None else ids.shape[dim]
        if ids.stride(dim) == 0 or length == 1:
            ids = ids.narrow(dim, 0, 1).expand(*ids.shape[:dim], count, *ids.shape[dim + 1 :])
            continue
        # torch's windows: from floor(i n / m) to ceil((i + 1) n / m)
        bounds = ((i * length // count, -(-(i + 1) * length // count)) for i in range(count))
        cuts = (ids.narrow(dim, start, end - start) for start, end in bounds)
        parts = [semantics.reduce(part, [dim], keepdim=True) for part in cuts]
        ids = torch.cat(parts, dim)
    return with_positions(semantics, ids, ids)


state(*(f"aten.upsample_nearest{rank}d" for rank in (1, 2, 3)), kind="upsampling", degree=(1,),
      linear="jointly", coefficients="one", separable=True)  # fmt: skip


@rule("aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d",
      "aten.upsample_trilinear3d",
      "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa", kind="upsampling", degree=(1,),
      linear="jointly", separable=True)  # fmt: skip
def interpolation(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Tensor:
    """Neighbours are mixed, so by transitivity all elements share one scale."""
    return semantics.reduce(x, range(2, len(x.shape)), keepdim=True).expand(semantics.place.shape)


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d",
      "aten.cudnn_grid_sampler", kind="resampling")  # fmt: skip
def sample(semantics: Semantics, x: Value, grid: Value, *args: Any) -> Tensor:
    """An image sampled at positions that may come from data."""
    semantics.pin([semantics.activation(grid)], "positions at which an image is read")
    return interpolation(semantics, x)
