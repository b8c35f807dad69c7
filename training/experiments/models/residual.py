"""Two small networks with identity skips, which give a unit the same scale in all blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """``x + V relu(U x)`` with 3 x 3 convolutions ``U`` and ``V``, ``inner`` channels between."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(width, inner, 3, padding=1)
        self.leave = nn.Conv2d(inner, width, 3, padding=1)

    def forward(self, stream: Tensor) -> Tensor:
        """Map (B, width, Y, X) to the same shape."""
        result: Tensor = stream + self.leave(torch.relu(self.enter(stream)))
        return result


class ResidualCNN(nn.Module):
    """A stem, residual blocks, global average pooling and a linear read-out."""

    def __init__(
        self, channels: int = 3, width: int = 6, inner: int = 5, outputs: int = 4, blocks: int = 2
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(width, inner) for _ in range(blocks)))
        self.readout = nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, channels, Y, X) to scores of shape (B, outputs)."""
        stream = self.blocks(torch.relu(self.stem(images)))
        result: Tensor = self.readout(torch.relu(stream).mean(dim=(2, 3)))
        return result


class Toy(nn.Module):
    """``y = w relu(x_2)``, ``x_2 = x_1 + B relu(x_1)``, ``x_1 = A x``: three linear layers 2-4-4-1
    without biases, 8 + 16 + 4 = 28 parameters; without ``skip``, ``x_2 = B relu(x_1)``. The paper
    fixes the numbers of layers and parameters; of all widths, these have a middle layer with an
    identity skip.
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
