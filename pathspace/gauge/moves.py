"""One tensor under a gauge transformation: ``p <- f (p + c) - c``, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, head: Tensor, tail: Tensor, constant: float = 0.0) -> Tensor:
    """``(tensor + constant) * head / tail - constant``, in the tensor's own type.

    The sum is formed in float64. Near ``-constant`` the type may not tell the two apart: then
    ``tensor * head / tail`` is taken if its sum is closer to what is wanted.
    """
    if not constant:
        return (tensor.detach() * head.to(tensor)).div_(tail.to(tensor))
    # torch's kernels add the constant in float32 where the tensor is no wider
    own = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    c = float(torch.tensor(constant, dtype=own))
    value = tensor.detach().double()
    factor = (head.double() / tail.double()).to(value.device)
    wanted = factor * (value + c)
    # (in this form a factor of 1 changes nothing)
    shifted, scaled = ((factor * value + add).to(tensor.dtype) for add in ((factor - 1) * c, 0.0))

    def distance(stored: Tensor) -> Tensor:
        ratio = (stored.double() + c) / wanted
        return torch.where(ratio > 0, ratio.clamp(min=1e-300).log().abs(), torch.inf)

    nearer = distance(scaled) < distance(shifted)
    return torch.where(nearer, scaled, shifted)


def move_(tensor: Tensor, head: Tensor, tail: Tensor, constant: float = 0.0) -> Tensor:
    """:func:`moved` in place; without a constant no second copy of the tensor is made."""
    if constant:
        return tensor.copy_(moved(tensor, head, tail, constant))
    return tensor.mul_(head.to(tensor)).div_(tail.to(tensor))
