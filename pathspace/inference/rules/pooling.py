"""Pooling over windows: positively homogeneous, so all elements of one window share one scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pathspace.inference.registry import rule
from pathspace.inference.rules.windows import pair, windows
from pathspace.inference.semantics import Semantics
from pathspace.inference.values import Value, constant

# what is true of means over windows
AVERAGED: dict[str, Any] = {
    "kind": "average pooling", "degree": (1,), "linear": "jointly", "coefficients": "positive",
    "separable": True
}  # fmt: skip


def _pool(
    semantics: Semantics,
    x: Value,
    rank: int,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil: bool,
) -> Tensor:
    ids = semantics.activation(x)
    kernel = pair(kernel, rank)
    stride = pair(stride, rank) if stride not in (None, [], ()) else kernel
    seen = windows(
        semantics,
        ids,
        kernel,
        stride,
        [(p, p) for p in pair(padding, rank)],
        pair(dilation, rank),
        ceil,
    )
    return semantics.reduce(seen, range(seen.dim() - rank, seen.dim()))


@rule(
    "aten.max_pool1d",
    "aten.max_pool2d",
    "aten.max_pool3d",
    kind="maximum pooling",
    degree=(1,),
    separable=True,
)
def max_pool(
    semantics: Semantics,
    x: Value,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> Tensor:
    """Maximum over windows (the margin is minus infinity, which has any scale)."""
    return _pool(semantics, x, int(semantics.place.op[-2]), kernel, stride, padding, dilation, ceil)


@rule("aten.max_pool1d_with_indices", "aten.max_pool2d_with_indices",
      "aten.max_pool3d_with_indices", kind="maximum pooling", degree=(1,),
      separable=True)  # fmt: skip
def max_pool_with_indices(
    semantics: Semantics, x: Value, kernel: Any, *args: Any
) -> tuple[Tensor, Tensor]:
    """Maximum over windows, and its position, which has no scale."""
    rank = int(semantics.place.op.split("max_pool")[1][0])
    options: list[Any] = [None, 0, 1, False]
    options[: len(args)] = args
    pooled = _pool(semantics, x, rank, kernel, options[0], options[1], options[2], options[3])
    return pooled, constant(pooled.shape)


@rule("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", **AVERAGED)
def avg_pool(
    semantics: Semantics,
    x: Value,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil: bool = False,
    *args: Any,
) -> Tensor:
    """Mean over windows."""
    return _pool(semantics, x, int(semantics.place.op[-2]), kernel, stride, padding, 1, ceil)


@rule(
    "aten.adaptive_avg_pool1d",
    "aten.adaptive_avg_pool2d",
    "aten.adaptive_avg_pool3d",
    "aten._adaptive_avg_pool2d",
    "aten._adaptive_avg_pool3d",
    **AVERAGED,
)
@rule("aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d",
      kind="maximum pooling", degree=(1,), separable=True)  # fmt: skip
def adaptive_pool(semantics: Semantics, x: Value, size: Any) -> Any:
    """Mean or maximum over windows that give a fixed output size."""
    ids = semantics.activation(x)
    name = semantics.place.op
    rank = int(name[-2])
    wanted = pair(size, rank)
    for i in range(rank):
        dim = ids.dim() - rank + i
        length, count = ids.shape[dim], wanted[i] if wanted[i] is not None else ids.shape[dim]
        if ids.stride(dim) == 0 or length == 1:
            ids = ids.narrow(dim, 0, 1).expand(*ids.shape[:dim], count, *ids.shape[dim + 1 :])
            continue
        # torch's windows: from floor(i n / m) to ceil((i + 1) n / m)
        parts = [
            semantics.reduce(
                ids.narrow(
                    dim, i * length // count, -(-(i + 1) * length // count) - i * length // count
                ),
                [dim],
                True,
            )
            for i in range(count)
        ]
        ids = torch.cat(parts, dim)
    return (ids, constant(ids.shape)) if "max" in name else ids
