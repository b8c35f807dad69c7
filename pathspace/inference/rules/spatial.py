"""Resampling of images, and decomposition into patches and back."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..registry import rule
from ..semantics import Semantics
from ..values import NEUTRAL, Value, along, compress, reshaped, shape_of
from .windows import per_dimension, windows


@rule("aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d",
      "aten._upsample_nearest_exact1d",
      "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact3d", kind="upsampling",
      degree=(1,), linear="jointly", coefficients="one", separable=True)  # fmt: skip
def nearest(semantics: Semantics, x: Value, size: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Every element is a copy of an element of the operand."""
    ids, shape = semantics.activation(x), shape_of(semantics.place.result)
    resize = getattr(torch.ops.aten, semantics.place.op.removeprefix("aten."))
    # a given factor, and not the ratio of the sizes, decides which element is copied
    factors = pytree.tree_leaves((args, [kwargs[name] for name in sorted(kwargs)]))
    factors = [] if all(factor is None for factor in factors) else factors

    def resized(t: Tensor) -> Tensor:
        # float64 represents ids below 2**53 exactly
        small = [n if t.shape[d] > 1 else 1 for d, n in enumerate(shape)]
        copied: Tensor = resize(t.double(), small[2:], *factors)
        return copied.long()

    spatial = [dim for dim in range(2, ids.dim()) if ids.stride(dim) != 0]
    if not spatial:
        return ids[:, :, *[slice(0, 1)] * (ids.dim() - 2)].expand(shape)
    return along(resized, ids, range(2, ids.dim())).expand(shape)


@rule("aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d",
      "aten.upsample_trilinear3d",
      "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa", kind="upsampling", degree=(1,),
      linear="jointly", separable=True)  # fmt: skip
def interpolation(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Tensor:
    """Neighbours are mixed, so by transitivity all elements share one scale."""
    return semantics.reduce(x, range(2, len(x.shape)), keepdim=True).expand(
        shape_of(semantics.place.result)
    )


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d",
      "aten.cudnn_grid_sampler", kind="resampling")  # fmt: skip
def sample(semantics: Semantics, x: Value, grid: Value, *args: Any) -> Tensor:
    """An image sampled at positions that may come from data; outside are zeros,
    or elements of the image.
    """
    semantics.pin([semantics.activation(grid)], "positions at which an image is read")
    return interpolation(semantics, x)


@rule("aten.affine_grid_generator", kind="transform", degree=(1,), linear="jointly")
def affine_grid(semantics: Semantics, theta: Value, *args: Any) -> Tensor:
    """Positions are a linear function of the parameters of the map."""
    return (
        semantics.reduce(theta, [-1, -2])
        .reshape(-1, *[1] * (len(semantics.place.result.shape) - 1))
        .expand(shape_of(semantics.place.result))
    )


@rule("aten.im2col", kind="transform", degree=(1,), linear="jointly", coefficients="one")
def patches(
    semantics: Semantics, x: Value, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> Tensor:
    """Sliding windows as columns."""
    ids, shape = semantics.activation(x), shape_of(semantics.place.result)
    batched = ids.dim() == 4
    ids = ids if batched else ids.unsqueeze(0)
    margins = [(p, p) for p in per_dimension(padding, 2)]
    # (N, C, out, out, kernel, kernel)
    seen = windows(
        semantics,
        ids,
        per_dimension(kernel, 2),
        per_dimension(stride, 2),
        margins,
        per_dimension(dilation, 2),
    )
    return reshaped(seen.permute(0, 1, 4, 5, 2, 3), shape)


@rule("aten.col2im", kind="transform", degree=(1,), linear="jointly", coefficients="one")
def columns_to_image(
    semantics: Semantics, x: Value, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> Tensor:
    """Columns as an image, summed in overlapping windows."""
    ids, shape = semantics.activation(x), shape_of(semantics.place.result)
    sizes, kernel, holes, crops, steps = (
        per_dimension(v, 2) for v in (size, kernel, dilation, padding, stride)
    )
    counts = [
        (n + 2 * p - h * (k - 1) - 1) // s + 1
        for n, p, h, k, s in zip(sizes, crops, holes, kernel, steps, strict=True)
    ]
    lead = ids.shape[:-2]
    thin = ids.narrow(0, 0, 1) if len(lead) and ids.stride(0) == 0 else ids
    parts = reshaped(
        thin, (*thin.shape[:-2], thin.shape[-2] // (kernel[0] * kernel[1]), *kernel, *counts)
    )
    whole = [n + 2 * p for n, p in zip(sizes, crops, strict=True)]
    out = torch.full((*parts.shape[:-4], *whole), NEUTRAL)
    for i, j in itertools.product(*(range(k) for k in kernel)):
        place = [
            slice(k * h, k * h + (c - 1) * s + 1, s)
            for k, h, c, s in zip((i, j), holes, counts, steps, strict=True)
        ]
        there = out[..., place[0], place[1]]
        there.copy_(semantics.join(there.clone(), parts[..., i, j, :, :]))
    for dim, (crop, n) in enumerate(zip(crops, sizes, strict=True), out.dim() - 2):
        out = out.narrow(dim, crop, n)
    return compress(out.contiguous()).expand(shape)
