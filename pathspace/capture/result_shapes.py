"""Shapes of the results of frequent operations on contiguous tensors, without the
kernels of the meta device.

Those kernels are written in Python and take a tenth of a millisecond each. Where anything is
unusual, the functions here say nothing, and the kernel decides: it also raises the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def result_shape(func: Any, args: tuple[Any, ...]) -> Sequence[int] | None:
    """The shape of an operation's contiguous result, of the type of its first operand, or
    ``None`` if it is not known.

    Args:
        func: the operation.
        args: its operands by place, on the meta device.

    Example:
        >>> x, weight = (
        ...     torch.empty(1, 3, 8, 8, device="meta"),
        ...     torch.empty(5, 3, 3, 3, device="meta"),
        ... )
        >>> result_shape(aten.conv2d.default, (x, weight, None, [2, 2], [1, 1]))
        (1, 5, 4, 4)
    """
    rule = RULES.get(func)
    # (automatic mixed precision changes types)
    return None if rule is None or torch._C._is_any_autocast_enabled() else rule(*args)


def _plain(*tensors: Any) -> bool:
    """Whether all are contiguous tensors of one type of floating point
    numbers; ``None`` counts as one.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    return all(
        isinstance(tensor, Tensor) and tensor.is_contiguous() and tensor.dtype == given[0].dtype
        for tensor in given
    ) and bool(given[0].is_floating_point())


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Sequence[int] | None:
    dims = weight.dim() - 2
    if not _plain(x, weight, bias) or x.dim() != weight.dim() or min(*x.shape, *weight.shape) == 0:
        return None
    outputs = weight.shape[0]
    if (
        x.shape[1] != weight.shape[1] * groups
        or outputs % groups
        or (bias is not None and bias.shape != (outputs,))
    ):
        return None
    options = [list(given) * (dims // len(given)) for given in (stride, padding, dilation)]
    if (
        any(len(given) != dims for given in options)
        or min(*options[0], *options[2]) < 1
        or min(options[1]) < 0
    ):
        return None
    room = [
        size + 2 * margin - hole * (width - 1) - 1
        for size, width, margin, hole in zip(
            x.shape[2:], weight.shape[2:], options[1], options[2], strict=True
        )
    ]
    if min(room) < 0:
        return None
    return (
        x.shape[0],
        outputs,
        *(free // step + 1 for free, step in zip(room, options[0], strict=True)),
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[int] | None:
    fits = (
        _plain(x, weight, bias)
        and weight.dim() == 2
        and x.dim() > 1
        and x.shape[-1] == weight.shape[1]
    )
    return (
        (*x.shape[:-1], weight.shape[0])
        if fits and (bias is None or bias.shape == weight.shape[:1])
        else None
    )


def _elementwise(x: Any, y: Any) -> Sequence[int] | None:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and _plain(x, y)):
        return None
    large, small = (x.shape, y.shape) if x.numel() >= y.numel() else (y.shape, x.shape)
    fits = len(small) <= len(large) and all(
        n in (1, m) for n, m in zip(small[::-1], large[::-1], strict=False)
    )
    return large if fits else None


def _mean(x: Tensor, dims: Any, keepdim: bool = False) -> Sequence[int] | None:
    rank = x.dim()
    if (
        not isinstance(dims, list)
        or not dims
        or not _plain(x)
        or max(dims) >= rank
        or min(dims) < -rank
    ):
        return None
    wanted = {dim % rank for dim in dims}
    if len(wanted) < len(dims):
        return None
    return [
        1 if dim in wanted else size
        for dim, size in enumerate(x.shape)
        if keepdim or dim not in wanted
    ]


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Sequence[int] | None:
    first = tensors[0].shape
    if not _plain(*tensors) or not -len(first) <= dim < len(first):
        return None
    dim %= len(first)
    others = {(tensor.dim(), *tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(others) > 1 or min(first) == 0:
        return None
    return (*first[:dim], sum(tensor.shape[dim] for tensor in tensors), *first[dim + 1 :])


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
) -> Sequence[int] | None:
    own = tuple(shape)
    fits = _plain(x, weight, bias) and x.shape[-len(own) :] == own
    return (
        x.shape
        if fits and all(each is None or each.shape == own for each in (weight, bias))
        else None
    )


def _batch_norm(x: Tensor, *vectors: Any) -> Sequence[int] | None:
    """``vectors`` begins with scale, shift, mean and variance, and whether the batch's
    own statistics are used.
    """
    *channels, of_batch = vectors[:5]
    # (mean and variance come together)
    usual = (channels[2] is None) == (channels[3] is None) and (of_batch or channels[3] is not None)
    if not usual or x.dim() < 2 or not x.numel() or not _plain(x, *channels):
        return None
    return x.shape if all(each is None or each.shape == x.shape[1:2] for each in channels) else None


RULES: dict[Any, Callable[..., Sequence[int] | None]] = {
    **dict.fromkeys((aten.conv1d.default, aten.conv2d.default, aten.conv3d.default), _convolution),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor), _elementwise),
    aten.linear.default: _linear,
    aten.mean.dim: _mean,
    aten.cat.default: _cat,
    aten.layer_norm.default: _layer_norm,
    aten.batch_norm.default: _batch_norm,
}
