"""A multilayer perceptron with biases and layers of different widths."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a ReLU network of widths 8-16-12-20-5 with biases, and four inputs.

    Example:
        >>> model, inputs = mlp()
        >>> model(*inputs).shape
        torch.Size([4, 5])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16),
            nn.ReLU(),
            nn.Linear(16, 12),
            nn.ReLU(),
            nn.Linear(12, 20),
            nn.ReLU(),
            nn.Linear(20, 5),
        )
        return model, (torch.randn(4, 8),)
