"""Sliding windows over spatial dimensions, as views of ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..semantics import Semantics
from ..values import NEUTRAL, along, compress


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
    if bool(met.all(1).any()):
        return True
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
            shape = list(view.shape)
            shape[dim], shape[-1] = count, kernel[i]
            ids = view.expand(shape)
            continue
        if padded:
            pad = [0, 0] * (ids.dim() - 1 - dim) + [before, after + extra]
            ids = along(
                lambda t, pad=pad: torch.nn.functional.pad(t, pad, value=NEUTRAL),  # type: ignore[misc]
                ids,
                [dim],
            )
        ids = ids.unfold(dim, reach, step)[..., :: dilation[i]]
        ids = ids.narrow(dim, 0, count)
    return (
        compress(ids)
        if any(ids.stride(d) and ids.shape[d] > 1 for d in range(lead, ids.dim()))
        else ids
    )
