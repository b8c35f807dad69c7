"""Convolutions that are differentiated by their inputs quickly, in float64 and
for many cotangents at once.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CONVOLUTIONS = {
    **{getattr(F, f"conv{k}d"): (k, False) for k in (1, 2, 3)},
    **{getattr(F, f"conv_transpose{k}d"): (k, True) for k in (1, 2, 3)},
}
# kernels up to this size are taken apart into one matrix product for each of their positions
MOST_TAPS = 64


class _Convolved(torch.autograd.Function):
    """A convolution whose backward pass is matrix products: in float64, for many
    cotangents, several times as quick.
    """

    @staticmethod
    def forward(
        ctx: Any, func: Any, x: Tensor, weight: Tensor, geometry: Any, groups: int
    ) -> Tensor:
        # per group: leaving times entering channels for each position of the kernel
        taps = (
            weight.unflatten(0, (groups, -1))
            .permute(*range(3, weight.dim() + 1), 0, 1, 2)
            .contiguous()
        )
        ctx.save_for_backward(taps)
        ctx.size, ctx.geometry = x.shape, geometry
        stride, padding, dilation = zip(*geometry, strict=True)
        result: Tensor = func(x, weight, None, stride, padding, dilation, groups)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (taps,), size = ctx.saved_tensors, ctx.size
        groups, leaving, entering = taps.shape[-3:]
        grad = grads[0].movedim(1, -1)
        grad = grad.reshape(*grad.shape[:-1], groups, leaving).movedim(-2, 0).contiguous()
        result = grad.new_zeros(groups, size[0], *size[2:], entering)
        for tap in product(*map(range, taps.shape[:-3])):
            spans = [
                _span(k, how, n, m)
                for k, how, n, m in zip(tap, ctx.geometry, size[2:], grad.shape[2:-1], strict=True)
            ]
            if all(made.stop > made.start for _, made in spans):
                here = (slice(None), slice(None), *(made for _, made in spans))
                there = (slice(None), slice(None), *(given for given, _ in spans))
                part = grad[here]
                if leaving == 1:
                    result[there] += part * taps[tap].reshape(
                        groups, *[1] * (part.dim() - 2), entering
                    )
                else:
                    flat = part.reshape(groups, prod(part.shape[1:-1]), part.shape[-1]) @ taps[tap]
                    result[there] += flat.reshape(*part.shape[:-1], entering)
        return None, result.movedim(0, -2).flatten(-2).movedim(-1, 1), None, None, None


def _span(tap: int, how: tuple[int, int, int], given: int, made: int) -> tuple[slice, slice]:
    """Which entries of a dimension one position of the kernel reads, and for which results."""
    stride, padding, dilation = how
    shift = tap * dilation - padding
    first = max(0, -(shift // stride))
    last = min(made, (given - 1 - shift) // stride + 1)
    return slice(first * stride + shift, max(0, (last - 1) * stride + shift + 1), stride), slice(
        first, last
    )


def convolved(func: Any, x: Tensor, weight: Tensor, *rest: Any, **more: Any) -> Tensor:
    """A convolution without bias, of whichever kind; derivatives are those by ``x`` alone.

    Args:
        func: the function in :mod:`torch.nn.functional`.
        x: inputs.
        weight: kernel.
        rest: its operands behind the bias.
        more: the same by keyword.

    Example:
        >>> x, kernel = torch.randn(1, 2, 5).double(), torch.randn(3, 2, 3).double()
        >>> torch.equal(convolved(F.conv1d, x, kernel, 2), F.conv1d(x, kernel, stride=2))
        True
    """
    spatial, transposed = CONVOLUTIONS[func]
    if transposed or prod(weight.shape[2:]) > MOST_TAPS or x.dim() != spatial + 2:
        return func(x, weight, None, *rest, **more)  # type: ignore[no-any-return]
    usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    how = usual | dict(zip(usual, rest, strict=False)) | more
    if isinstance(how["padding"], str):
        return func(x, weight, None, **how)  # type: ignore[no-any-return]
    ways = [
        (how[name],) if isinstance(how[name], int) else tuple(how[name]) for name in list(usual)[:3]
    ]
    geometry = tuple(zip(*(way * (spatial // len(way)) for way in ways), strict=True))
    return _Convolved.apply(func, x, weight, geometry, how["groups"])  # type: ignore[no-any-return, no-untyped-call]
