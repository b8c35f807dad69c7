"""A convolutional network with identity skips, which give a channel the
same scale in all blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """``x + V relu(U x)`` with 3 x 3 convolutions ``U`` and ``V``.

    Args:
        width: channels of the residual stream.
        inner: channels between the two convolutions.

    Example:
        >>> ResidualBlock(4, 6)(torch.zeros(1, 4, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(width, inner, 3, padding=1)
        self.leave = nn.Conv2d(inner, width, 3, padding=1)

    def forward(self, stream: Tensor) -> Tensor:
        """Map (B, width, Y, X) to the same shape."""
        result: Tensor = stream + self.leave(torch.relu(self.enter(stream)))
        return result


class ResidualCNN(nn.Module):
    """A stem, residual blocks, global average pooling and a linear read-out.

    Args:
        channels: channels of the input images.
        width: channels of the residual stream.
        inner: channels inside the blocks.
        outputs: scores per image.
        blocks: residual blocks.

    Example:
        >>> ResidualCNN()(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 4])
    """

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
