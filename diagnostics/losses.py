"""Losses for models that come without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pathspace.errors import InputError


def random_class_loss(seed: int) -> Callable[[Any, Any], Tensor]:
    """A loss that needs no targets: random classes for scores, the mean square otherwise.

    Args:
        seed: seed of the classes.

    Returns:
        ``(outputs, targets) -> scalar``; the targets are not looked at.
    """

    def loss(outputs: Any, _: Any) -> Tensor:
        scores = next((tensor for tensor in _tensors(outputs) if tensor.is_floating_point()), None)
        if scores is None:
            raise InputError(
                "The outputs hold no tensor of real numbers, expected one to take a loss of; pass loss_fn=."
            )
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if scores.ndim in (2, 3) and scores.shape[-1] > 1:
            generator = torch.Generator().manual_seed(seed)
            classes = torch.randint(0, scores.shape[-1], scores.shape[:-1], generator=generator).to(scores.device)
            return F.cross_entropy(scores.flatten(0, -2), classes.flatten())
        return scores.square().mean()

    return loss


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """In order; numbers and other things among the outputs are passed over."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif hasattr(outputs, "values") or isinstance(outputs, list | tuple):
        for value in outputs.values() if hasattr(outputs, "values") else outputs:
            yield from _tensors(value)
