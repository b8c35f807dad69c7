"""Resampling of images."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import Value, shape_of

state(*(f"aten.upsample_nearest{rank}d" for rank in (1, 2, 3)), kind="upsampling", degree=(1,),
      linear="jointly", coefficients="one", separable=True)  # fmt: skip


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
    """An image sampled at positions that may come from data."""
    semantics.pin([semantics.activation(grid)], "positions at which an image is read")
    return interpolation(semantics, x)
