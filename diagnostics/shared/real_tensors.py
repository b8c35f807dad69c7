"""Floating-point tensors among inputs and outputs, and random signs of their shape."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def is_real(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def first_real(value: Any) -> Tensor | None:
    """The first floating-point tensor in inputs or outputs."""
    return next(filter(is_real, tree_leaves(value)), None)


def in_float64(value: Any) -> Any:
    """A floating-point tensor in float64 and without a gradient; other values as they are."""
    return value.detach().double() if is_real(value) else value


def rademacher(like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent random signs of the shape of a tensor."""
    signs = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return signs.to(like).mul_(2).sub_(1)
