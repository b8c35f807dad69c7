"""Convolutions: channels are units, the taps of a kernel are parallel edges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import NEUTRAL, Value, Weight, compress, reshaped
from .contraction import contract_ids, with_bias
from .edges import edges
from .windows import per_dimension, windows

# properties of every convolution
CONVOLVED: dict[str, Any] = {
    "kind": "convolution", "degree": (1, 1), "linear": "each", "coefficients": "one", "bias": 2
}  # fmt: skip
Margins = Sequence[tuple[int, int]]
Sizes = int | Sequence[int]


def _convolved(
    semantics: Semantics,
    ids: Tensor,
    weight: Value,
    steps: Sequence[int],
    margins: Margins,
    holes: Sequence[int],
) -> Tensor:
    """Correlate ``ids`` (N, C, ...) with ``weight`` (groups, out / groups, C / groups, ...)."""
    rank, (groups, outs, ins), kernel = (
        len(weight.shape) - 3,
        weight.shape[:3],
        list(weight.shape[3:]),
    )
    # (N, C, out..., kernel...)
    seen = windows(semantics, ids, kernel, steps, margins, holes)
    batch, sizes = seen.shape[0], list(seen.shape[2 : 2 + rank])
    seen = reshaped(seen, (batch, groups, 1, ins, *sizes, *kernel))
    # (N, groups, 1, out..., C / groups, kernel...)
    seen = seen.permute(0, 1, 2, *range(4, 4 + rank), 3, *range(4 + rank, 4 + 2 * rank))
    summed = list(range(3 + rank, 4 + 2 * rank))
    place = (None, slice(None), slice(None), *(None,) * rank)
    if isinstance(weight, Weight):
        out = edges(semantics, weight.moved(lambda t: t[place], semantics.offsets), seen, summed)
    else:
        out = contract_ids(semantics, weight[place], seen, summed)
    return reshaped(out, (batch, groups * outs, *sizes))


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d", **CONVOLVED)
def convolution(
    semantics: Semantics,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sizes = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """``y = W * x + b`` with windows of any stride, padding, dilation, and groups."""
    ids, rank = semantics.activation(x), len(weight.shape) - 2
    batched = ids.dim() == rank + 2
    steps, holes = per_dimension(stride, rank), per_dimension(dilation, rank)
    if isinstance(padding, str):
        total = [
            h * (k - 1) if padding == "same" else 0
            for h, k in zip(holes, weight.shape[2:], strict=True)
        ]
        margins = [(t // 2, t - t // 2) for t in total]
    else:
        margins = [(p, p) for p in per_dimension(padding, rank)]
    ids = ids if batched else ids.unsqueeze(0)
    shape = (groups, weight.shape[0] // groups, *weight.shape[1:])
    own = semantics.moved(lambda t: t.reshape(shape), weight)
    out = _convolved(semantics, ids, own, steps, margins, holes)
    out = with_bias(semantics, out, bias, 1)
    return out if batched else out.squeeze(0)


@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d",
      **(CONVOLVED | {"kind": "transposed convolution"}))  # fmt: skip
def transposed_convolution(
    semantics: Semantics,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The transpose of a convolution, ``weight`` (in, out / groups, ...).

    With stride ``s`` the outputs at positions ``r, r + s, r + 2 s, ...`` use only every ``s``-th
    tap: each such comb is a separate convolution with its own units.
    """
    ids, rank = semantics.activation(x), len(weight.shape) - 2
    batched = ids.dim() == rank + 2
    ids = ids if batched else ids.unsqueeze(0)
    steps, crops, extras, holes = (
        per_dimension(v, rank) for v in (stride, padding, output_padding, dilation)
    )
    kernel = weight.shape[2:]
    # as a convolution's weight: (groups, out / groups, in / groups, kernel)
    split = (groups, weight.shape[0] // groups, *weight.shape[1:])
    own = semantics.moved(lambda t: t.reshape(split).transpose(1, 2), weight)
    sizes = [(n - 1) * s - 2 * p + h * (k - 1) + e + 1
             for n, s, p, h, k, e
             in zip(ids.shape[2:], steps, crops, holes, kernel, extras, strict=True)]  # fmt: skip
    outs = weight.shape[1] * groups
    combs: dict[tuple[int, ...], Tensor] = {}
    for residue in itertools.product(*(range(s) for s in steps)):
        combs[residue] = _comb(semantics, ids, own, residue, sizes, steps, crops, holes)
    wide = (ids.shape[0], outs, *sizes)
    out = combs[(0,) * rank] if len(combs) == 1 else _interleaved(semantics, combs, wide, steps)
    out = with_bias(semantics, out, bias, 1)
    return out if batched else out.squeeze(0)


def _comb(
    semantics: Semantics, ids: Tensor, weight: Value, residue: Sequence[int], sizes: Sequence[int],
    steps: Sequence[int], crops: Sequence[int], holes: Sequence[int],
) -> Tensor:  # fmt: skip
    """Outputs at positions ``residue + s * n``: tap k connects input i and output p if
    ``p + crop = i s + k h``.
    """
    taps, margins, counts, small = [], [], [], ids
    for dim, (r, size, s, p, h) in enumerate(zip(residue, sizes, steps, crops, holes, strict=True)):
        count = max(0, -(-(size - r) // s))
        found = [k for k in range(weight.shape[3 + dim]) if (r + p - k * h) % s == 0]
        taps.append(found)
        counts.append(count)
        if not found or not count:
            continue
        # input position of the first output for each tap, falling as taps rise
        starts = [(r + p - k * h) // s for k in found]
        length = ids.shape[2 + dim]
        before, after = max(0, -min(starts)), max(0, max(starts) + count - length)
        margins.append((before, after))
        low, high = max(0, min(starts)), min(length, max(starts) + count)
        small = small.narrow(2 + dim, low, max(high - low, 0)) if low or high < length else small
    shape = (ids.shape[0], weight.shape[0] * weight.shape[1], *counts)
    if any(not found for found in taps) or 0 in counts or 0 in small.shape:
        return torch.tensor(NEUTRAL).expand(shape)
    gaps = [found[1] - found[0] if len(found) > 1 else 1 for found in taps]
    dilations = [max(1, g * h // s) for g, h, s in zip(gaps, holes, steps, strict=True)]

    def chosen(t: Tensor) -> Tensor:
        for dim, found in enumerate(taps):
            t = t.narrow(3 + dim, found[0], found[-1] - found[0] + 1)
            if len(found) > 1 and gaps[dim] > 1:
                t = t[(slice(None),) * (3 + dim) + (slice(None, None, gaps[dim]),)]
        return t

    # a flipped kernel is equivalent to a flip of the image before and after the convolution
    dims = [2 + dim for dim in range(len(taps))]
    turned = small.flip(dims) if _varies(small) else small
    own = semantics.moved(chosen, weight)
    swapped = [(after, before) for before, after in margins]
    out = _convolved(semantics, turned, own, [1] * len(taps), swapped, dilations)
    # (padding alone can tell the places of the result apart)
    out = out.flip(dims) if _varies(out) else out
    return out.expand(shape)


def _varies(ids: Tensor) -> bool:
    return any(ids.stride(dim) != 0 and ids.shape[dim] > 1 for dim in range(2, ids.dim()))


def _interleaved(
    semantics: Semantics,
    combs: dict[tuple[int, ...], Tensor],
    shape: Sequence[int],
    steps: Sequence[int],
) -> Tensor:
    """Interleave the combs; combs with equal constant ids become one tensor of stride 0."""
    first = next(iter(combs.values()))
    thin = 1 if all(comb.stride(0) == 0 for comb in combs.values()) else shape[0]
    out = torch.full((thin, *shape[1:]), NEUTRAL, dtype=first.dtype)
    for residue, comb in combs.items():
        place = (
            slice(None),
            slice(None),
            *(slice(r, None, s) for r, s in zip(residue, steps, strict=True)),
        )
        out[place] = comb[:thin]
    return compress(out).expand(tuple(shape))


@rule("aten.convolution", "aten._convolution", **CONVOLVED)
def general(
    semantics: Semantics, x: Value, weight: Value, bias: Value | None, stride: Sizes,
    padding: Sizes, dilation: Sizes, transposed: bool, output_padding: Sizes, groups: int,
    *args: Any,
) -> Tensor:  # fmt: skip
    """A convolution or a transposed one."""
    if transposed:
        return transposed_convolution(
            semantics, x, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return convolution(semantics, x, weight, bias, stride, padding, dilation, groups)
