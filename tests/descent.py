"""Steps down a loss, as most tests of optimizers take them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def descend(
    optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int = 1
) -> list[float]:
    """Take steps; return the loss before each."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses
