"""Sliding windows over spatial dimensions, as views of ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pathspace.inference.semantics import Semantics
from pathspace.inference.values import NEUTRAL, along, compress


def pair(value: int | Sequence[int], rank: int) -> list[int]:
    """A number or a list of numbers, one per spatial dimension."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * rank if len(numbers) == 1 else numbers


def windows(
    semantics: Semantics,
    ids: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    margins: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    ceil: bool = False,
) -> Tensor:
    """Windows of the last dimensions: ``(..., in...) -> (..., out..., kernel...)``; margins are exact zeros.

    Args:
        semantics: the interpretation (part of every rule's signature).
        ids: activations.
        kernel: window sizes.
        stride: steps between windows.
        margins: zeros before and after, for each dimension.
        dilation: steps within a window.
        ceil: include a last window that is only partly inside.

    Returns:
        A view; dimensions with stride 0 keep it.
    """
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
        # the first window in which a tap is not in the left margin has it in the data, or no window has
        firsts = [(tap, max(0, -((tap - before) // step))) for tap in range(0, reach, dilation[i])]
        every_tap_meets_data = all(n < count and n * step - before + tap < size for tap, n in firsts)
        if ids.stride(dim) == 0 and every_tap_meets_data and (semantics.uniform or not (before or after or extra)):
            view = ids.narrow(dim, 0, 1).unsqueeze(-1)
            shape = list(view.shape)
            shape[dim], shape[-1] = count, kernel[i]
            ids = view.expand(shape)
            continue
        if before or after or extra:
            pad = [0, 0] * (ids.dim() - 1 - dim) + [before, after + extra]
            ids = along(lambda t, pad=pad: torch.nn.functional.pad(t, pad, value=NEUTRAL), ids, [dim])  # type: ignore[misc]
        ids = ids.unfold(dim, reach, step)[..., :: dilation[i]]
        ids = ids.narrow(dim, 0, count)
    return compress(ids) if any(ids.stride(d) and ids.shape[d] > 1 for d in range(lead, ids.dim())) else ids
