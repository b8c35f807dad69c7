"""Convolutions: channels are units, the taps of a kernel are parallel edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import NEUTRAL, Value, reshaped
from .contraction import products, with_bias
from .edges import arguments_of
from .pooling import per_dimension, windows

# properties of every convolution
CONVOLVED: dict[str, Any] = {
    "kind": "convolution", "degree": (1, 1), "linear": "each", "coefficients": "one", "bias": 2
}  # fmt: skip
Margins = Sequence[tuple[int, int]]


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
    out = products(semantics, semantics.moved(lambda t: t[place], weight), seen, summed)
    return reshaped(out, (batch, groups * outs, *sizes))


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution", "aten._convolution",
      **CONVOLVED)  # fmt: skip
@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d",
      **(CONVOLVED | {"kind": "transposed convolution"}))  # fmt: skip
def convolution(
    semantics: Semantics, x: Value, weight: Value, bias: Value | None = None, *args: Any,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """``y = W * x + b`` with windows of any stride, padding, dilation and groups, or transposed."""
    given = arguments_of(semantics, x, weight, bias, *args, **kwargs)
    ids, rank, groups = semantics.activation(x), len(weight.shape) - 2, given["groups"]
    batched = ids.dim() == rank + 2
    ids = ids if batched else ids.unsqueeze(0)
    steps, holes = (per_dimension(given[name], rank) for name in ("stride", "dilation"))
    split = (groups, weight.shape[0] // groups, *weight.shape[1:])
    own = semantics.moved(lambda t: t.reshape(split), weight)
    padding = given["padding"]
    if given.get("transposed", "transpose" in semantics.place.op):
        crops, extras = (per_dimension(sizes, rank) for sizes in (padding, given["output_padding"]))
        out = _transposed(semantics, ids, own, steps, crops, extras, holes)
    else:
        if isinstance(padding, str):
            total = [
                h * (k - 1) if padding == "same" else 0
                for h, k in zip(holes, weight.shape[2:], strict=True)
            ]
            margins = [(t // 2, t - t // 2) for t in total]
        else:
            margins = [(p, p) for p in per_dimension(padding, rank)]
        out = _convolved(semantics, ids, own, steps, margins, holes)
    out = with_bias(semantics, out, bias, 1)
    return out if batched else out.squeeze(0)


def _transposed(
    semantics: Semantics,
    ids: Tensor,
    weight: Value,
    steps: Sequence[int],
    crops: Sequence[int],
    extras: Sequence[int],
    holes: Sequence[int],
) -> Tensor:
    """A convolution with the flipped kernel, and zeros between elements."""
    kernel = weight.shape[3:]
    rank = len(kernel)
    # as a convolution's weight: (groups, out / groups, in / groups, kernel)
    own = semantics.moved(lambda t: t.transpose(1, 2), weight)
    if semantics.uniform:
        # (one element for each channel reads all taps)
        sizes = [
            (n - 1) * s - 2 * p + h * (k - 1) + e + 1
            for n, s, p, h, k, e in zip(
                ids.shape[2:], steps, crops, holes, kernel, extras, strict=True
            )
        ]
        wide = semantics.reduce(ids, range(2, 2 + rank), keepdim=True)
        wide = wide.expand(*ids.shape[:2], *kernel)
        out = _convolved(semantics, wide, own, [1] * rank, [(0, 0)] * rank, [1] * rank)
        return out.expand(*out.shape[:2], *sizes)
    apart = [(n - 1) * s + 1 for n, s in zip(ids.shape[2:], steps, strict=True)]
    wide = torch.full((*ids.shape[:2], *apart), NEUTRAL)
    wide[:, :, *(slice(None, None, s) for s in steps)] = ids
    own = semantics.moved(lambda t: t.flip(list(range(3, 3 + rank))), own)
    margins = [
        (h * (k - 1) - p, h * (k - 1) - p + e)
        for h, k, p, e in zip(holes, kernel, crops, extras, strict=True)
    ]
    return _convolved(semantics, wide, own, [1] * rank, margins, holes)
