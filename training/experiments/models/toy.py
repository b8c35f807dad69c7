"""The 28-parameter network of the Markov-chain paper's Figure 2(b), without
and with a skip connection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Toy(nn.Module):
    """``y = w relu(x_1 + relu-branch)``: three linear layers 2-4-4-1 without biases, 8
    + 16 + 4 = 28 parameters.

    The paper fixes the number of layers and of parameters but not the widths. This is the one
    choice whose middle layer can carry an identity skip: ``x_1 = A x``, ``x_2 = x_1 + B
    relu(x_1)``, ``y = w relu(x_2)``.

    Args:
        skip: add ``x_1`` to the middle layer's output.

    Reference:
        Rethinking skip connection model as a learnable Markov chain, Figure 2(b).

    Example:
        >>> sum(p.numel() for p in Toy().parameters()), Toy()(torch.zeros(3, 2)).shape
        (28, torch.Size([3, 1]))
    """

    def __init__(self, skip: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 4, bias=False)
        self.middle = nn.Linear(4, 4, bias=False)
        self.leave = nn.Linear(4, 1, bias=False)
        self.skip = skip

    def forward(self, points: Tensor) -> Tensor:
        """Map points of shape (B, 2) to values of shape (B, 1)."""
        state = self.enter(points)
        branch = self.middle(torch.relu(state))
        state = state + branch if self.skip else branch
        result: Tensor = self.leave(torch.relu(state))
        return result
