"""Weights rounded to a few bits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..errors import InputError

LAYERS = (nn.Linear, _ConvNd, nn.Embedding)


def check_format(bits: int, per: str) -> None:
    """Check a number of bits, 2 to 16, and a granularity."""
    if not (isinstance(bits, int) and 2 <= bits <= 16):
        raise InputError(f"bits is {bits!r}, expected a whole number from 2 to 16.")
    if per not in ("tensor", "channel"):
        raise InputError(f"per is {per!r}, expected 'tensor' or 'channel'.")


def weight_axes(model: nn.Module) -> dict[str, int]:
    """Weights of layers, and parameters with two dimensions, each with its output channels'."""
    found = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, key = name.rpartition(".")
        module, matrix = modules.get(path), sum(size > 1 for size in parameter.shape) > 1
        layer = isinstance(module, LAYERS) and key == "weight"
        if parameter.is_floating_point() and (layer or matrix):
            found[name] = int(isinstance(module, _ConvTransposeNd) and parameter.dim() > 1)
    return found


def quantised(weight: Tensor, bits: int, axis: int | None = None) -> Tensor:
    """``step * round(w / step)`` with ``step = max |w| / (2^(bits - 1) - 1)``."""
    dims = [dim for dim in range(weight.dim()) if dim != axis]
    # (steps in half precision would not be equal)
    wide = weight.float() if weight.itemsize < 4 else weight
    peak = wide.detach().abs().amax(dims, keepdim=True) if dims else wide.detach().abs()
    step = peak / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (wide / step).round() * step, 0).to(weight.dtype)


def quantised_weights(
    parameters: Mapping[str, Tensor], axes: Mapping[str, int], bits: int, per: str
) -> dict[str, Tensor]:
    """The quantised weights of a model, by name."""
    return {
        name: quantised(parameters[name], bits, axis if per == "channel" else None)
        for name, axis in axes.items()
    }


def decibels(noise: float) -> float:
    """Signal-to-noise ratio for a signal of power 1; minus infinity for NaN."""
    if math.isnan(noise):
        return -math.inf
    return -10 * math.log10(noise) if noise > 0 else math.inf
