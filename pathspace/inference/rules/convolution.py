"""Convolutions: channels are units, the taps of a kernel are parallel edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import NEUTRAL, Value, reshaped
from .contraction import products
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
    groups, outs, ins, *kernel = weight.shape
    rank = len(kernel)
    # (N, C, out..., kernel...)
    seen = windows(semantics, ids, kernel, steps, margins, holes)
    batch, sizes = seen.shape[0], list(seen.shape[2 : 2 + rank])
    seen = reshaped(seen, (batch, groups, 1, ins, *sizes, *kernel))
    # (N, groups, 1, out..., C / groups, kernel...)
    seen = seen.movedim(3, 3 + rank)
    place = (None, slice(None), slice(None), *(None,) * rank)
    own, summed = semantics.moved(lambda t: t[place], weight), range(3 + rank, seen.dim())
    out = products(semantics, own, seen, summed)
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
    ids, kernel, groups = semantics.activation(x), weight.shape[2:], given["groups"]
    rank = len(kernel)
    batched = ids.dim() == rank + 2
    ids = ids if batched else ids.unsqueeze(0)
    split = (groups, weight.shape[0] // groups, *weight.shape[1:])
    own = semantics.moved(lambda t: t.reshape(split), weight)
    steps, holes = (per_dimension(given[name], rank) for name in ("stride", "dilation"))
    reach = [hole * (taps - 1) for hole, taps in zip(holes, kernel, strict=True)]
    if isinstance(given["padding"], str):
        total = reach if given["padding"] == "same" else [0] * rank
        margins = [(t // 2, t - t // 2) for t in total]
    else:
        margins = [(p, p) for p in per_dimension(given["padding"], rank)]
    if given.get("transposed", "transpose" in semantics.place.op):
        own, lead = semantics.moved(lambda t: t.transpose(1, 2), own), ids.shape[:2]
        if semantics.uniform:
            # (one element for each channel reads all taps)
            ids = semantics.reduce(ids, range(2, 2 + rank), keepdim=True).expand(*lead, *kernel)
            margins, holes = [(0, 0)] * rank, [1] * rank
        else:
            # with zeros between elements, and the flipped kernel
            apart = [(n - 1) * step + 1 for n, step in zip(ids.shape[2:], steps, strict=True)]
            wide = torch.full((*lead, *apart), NEUTRAL)
            wide[:, :, *(slice(None, None, step) for step in steps)] = ids
            ids, own = wide, semantics.moved(lambda t: t.flip(list(range(3, 3 + rank))), own)
            extras = per_dimension(given["output_padding"], rank)
            sides = zip(reach, margins, extras, strict=True)
            margins = [(far - p, far - p + extra) for far, (p, _), extra in sides]
        steps = [1] * rank
    out = _convolved(semantics, ids, own, steps, margins, holes)
    if bias is not None:
        out = semantics.join(out, semantics.activation(bias).reshape(-1, *[1] * rank))
    out = out.expand(*out.shape[:2], *semantics.place.shape[-rank:])
    return out if batched else out.squeeze(0)
