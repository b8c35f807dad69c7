"""Linear maps whose weight is a parameter: each scalar weight is an edge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pathspace.inference.registry import rule
from pathspace.inference.rules.windows import pair, windows
from pathspace.inference.semantics import Semantics
from pathspace.inference.values import ROOT, Value, Weight, constant, distinct


def _with_bias(semantics: Semantics, out: Tensor, bias: Value | None, dim: int) -> Tensor:
    if bias is None:
        return out
    shape = [1] * out.dim()
    shape[dim] = -1
    ids = semantics.attach(bias) if isinstance(bias, Weight) else bias
    return semantics.join(out, ids.reshape(shape))


def _computed(semantics: Semantics, weight: Value, reason: str) -> bool:
    """Whether the weight is not a parameter view; then its free scales are fixed."""
    if isinstance(weight, Weight):
        return False
    if not bool((distinct(weight) == ROOT).all()):
        semantics.pin([weight], reason)
    return True


@rule("aten.linear")
def linear(semantics: Semantics, x: Value, weight: Value, bias: Value | None = None) -> Tensor:
    """``y[..., o] = sum_i W[o, i] x[..., i] + b[o]``."""
    ids = semantics.activation(x)
    if _computed(semantics, weight, "the weight of a linear map is computed from free scales"):
        out = semantics.reduce(ids, [-1], keepdim=True).expand(*ids.shape[:-1], weight.shape[0])
    else:
        assert isinstance(weight, Weight)
        lead = (1,) * (ids.dim() - 1)
        view = weight.moved(lambda t: t.reshape(*lead, *t.shape), semantics.offsets)
        out = semantics.contract(view, ids.unsqueeze(-2), [-1])
    return _with_bias(semantics, out, bias, -1)


@rule("aten.addmm")
def addmm(semantics: Semantics, bias: Value, x: Value, weight: Value, **kwargs: Any) -> Tensor:
    """``b + x W`` with ``W`` of shape (in, out)."""
    return semantics.join(bias, matmul(semantics, x, weight))


@rule("aten.mm", "aten.matmul")
def matmul(semantics: Semantics, x: Value, weight: Value) -> Tensor:
    """``x W`` where one side is a matrix parameter."""
    if isinstance(weight, Weight) and len(weight.shape) == 2 and len(x.shape) >= 1:
        return linear(semantics, semantics.activation(x), weight.moved(lambda t: t.t(), semantics.offsets))
    if isinstance(x, Weight) and len(x.shape) == 2 and not isinstance(weight, Weight) and weight.dim() >= 2:
        return linear(semantics, weight.transpose(-1, -2), x).transpose(-1, -2)
    left, right = semantics.activation(x), semantics.activation(weight)
    rows, columns = left.shape[:-1], right.shape[:-2] + right.shape[-1:]
    if bool((distinct(right) == ROOT).all()) and right.dim() == 2:
        return semantics.reduce(left, [-1], keepdim=True).expand(*rows, right.shape[-1])
    semantics.pin([left, right], "a product of two activations")
    if left.dim() == 1 or right.dim() == 1:
        return constant(rows if right.dim() == 1 else columns)
    shape = [*max(left.shape[:-2], right.shape[:-2], key=len), left.shape[-2], right.shape[-1]]
    return constant(shape)


@rule("aten.embedding")
def embedding(semantics: Semantics, weight: Value, index: Value, *args: Any, **kwargs: Any) -> Tensor:
    """Rows looked up by position: every row enters the same units, since data decides which is read."""
    if not isinstance(weight, Weight):
        ids = semantics.reduce(weight, [0])
        return ids.expand(*index.shape, weight.shape[-1])
    ones = constant((weight.shape[0], 1))
    heads = semantics.contract(
        weight.moved(lambda t: t.t().unsqueeze(0), semantics.offsets), ones.reshape(1, 1, -1), [-1]
    )
    return heads.reshape(-1).expand(*index.shape, weight.shape[-1])


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(
    semantics: Semantics,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Channels are units; the taps of a kernel are parallel edges."""
    ids = semantics.activation(x)
    rank = len(weight.shape) - 2
    batched = ids.dim() == rank + 2
    if not batched:
        ids = ids.unsqueeze(0)
    kernel = list(weight.shape[2:])
    steps, holes = pair(stride, rank), pair(dilation, rank)
    if isinstance(padding, str):
        total = [h * (k - 1) if padding == "same" else 0 for h, k in zip(holes, kernel, strict=True)]
        margins = [(t // 2, t - t // 2) for t in total]
    else:
        margins = [(p, p) for p in pair(padding, rank)]
    # (N, C, out..., kernel...)
    seen = windows(semantics, ids, kernel, steps, margins, holes)
    batch, channels, sizes = seen.shape[0], seen.shape[1], list(seen.shape[2 : 2 + rank])
    seen = seen.reshape(batch, groups, 1, channels // groups, *sizes, *kernel)
    # (N, groups, 1, out..., C / groups, kernel...)
    seen = seen.permute(0, 1, 2, *range(4, 4 + rank), 3, *range(4 + rank, 4 + 2 * rank))
    summed = list(range(3 + rank, 4 + 2 * rank))
    outs = weight.shape[0]
    if _computed(semantics, weight, "the weight of a convolution is computed from free scales"):
        out = semantics.reduce(seen, summed).expand(batch, groups, outs // groups, *sizes)
    else:
        assert isinstance(weight, Weight)
        view = weight.moved(
            lambda t: t.reshape(1, groups, outs // groups, *[1] * rank, channels // groups, *kernel),
            semantics.offsets,
        )
        out = semantics.contract(view, seen, summed)
    out = out.reshape(batch, math.prod(out.shape[1:3]), *sizes)
    out = _with_bias(semantics, out, bias, 1)
    return out if batched else out.squeeze(0)
