"""The recurrent convolutional network of the path-space paper: every
layer feeds back into itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RecurrentConv(nn.Module):
    """``h_t = relu(norm_t(F x + R h_(t-1)))`` for t = 1..unfold, ``h_0 = relu(norm_0(F x))``.

    The same two kernels are used at every step; each step has batch statistics of
    its own, as states differ.

    Args:
        inputs: channels that enter.
        width: channels of the state.
        unfold: how many times the recurrent kernel is used.

    Reference:
        Path Space for Recurrent Neural Networks with ReLU Activations,
        section 5.3 and appendix A.3.

    Example:
        >>> RecurrentConv(3, 4)(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 4, 8, 8])
    """

    def __init__(self, inputs: int, width: int, unfold: int = 3) -> None:
        super().__init__()
        self.enter = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
        self.recur = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(unfold + 1))

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, inputs, Y, X) to (B, width, Y, X)."""
        entering = self.enter(images)
        state = torch.relu(self.norms[0](entering))
        for norm in list(self.norms)[1:]:
            state = torch.relu(norm(entering + self.recur(state)))
        return state


class RecurrentCNN(nn.Module):
    """A convolution, recurrent layers with pooling between them, and a linear
    read-out of the maximum.

    The paper's network has one plain layer, four recurrent ones, unfolded 3 times, and dropout
    before the read-out only.

    Args:
        channels: channels of the images.
        width: feature maps of every layer.
        outputs: scores per image.
        layers: recurrent layers.
        unfold: see :class:`RecurrentConv`.
        dropout: before the read-out.
        overlapping: halve the image as Liang and Hu do: by maxima over 3 x 3, after the first layer
            and in the middle of the recurrent ones; otherwise by maxima over 2 x 2, after each of
            the first two recurrent layers.

    Reference:
        Liang and Hu, Recurrent convolutional neural network for object recognition, section 3.3.

    Example:
        >>> RecurrentCNN(1, 4, 10, layers=2)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        channels: int,
        width: int,
        outputs: int,
        layers: int = 4,
        unfold: int = 3,
        dropout: float = 0.0,
        overlapping: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        # after how many recurrent layers the image is halved
        halved = (0, layers // 2) if overlapping else (1, 2)
        body: list[nn.Module] = []
        for done in range(layers + 1):
            if done:
                body.append(RecurrentConv(width, width, unfold))
            if done in halved:
                body.append(nn.MaxPool2d(3, 2, padding=1) if overlapping else nn.MaxPool2d(2))
        self.body = nn.Sequential(*body)
        self.dropout = nn.Dropout(dropout)
        self.readout = nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, channels, Y, X) to scores of shape (B, outputs)."""
        result: Tensor = self.readout(self.dropout(self.body(self.stem(images)).amax(dim=(2, 3))))
        return result
