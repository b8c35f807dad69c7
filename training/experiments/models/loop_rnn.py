"""A recurrent network written as a Python loop: the same weights are used at every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LoopRNN(nn.Module):
    """``h_t = relu(W_i x_t + W_r h_(t-1) + b)``, unrolled by hand, and a linear
    read-out of the last step.

    Args:
        inputs: features per step.
        hidden: hidden units.
        outputs: scores per sequence.

    Example:
        >>> LoopRNN(3, 7, 2)(torch.zeros(4, 6, 3)).shape
        torch.Size([4, 2])
    """

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, hidden)
        self.recur = nn.Linear(hidden, hidden, bias=False)
        self.readout = nn.Linear(hidden, outputs)

    def forward(self, sequence: Tensor) -> Tensor:
        """Map sequences of shape (B, T, inputs) to scores of shape (B, outputs)."""
        state = sequence.new_zeros(sequence.shape[0], self.recur.in_features)
        for step in sequence.unbind(dim=1):
            state = torch.relu(self.enter(step) + self.recur(state))
        result: Tensor = self.readout(state)
        return result
