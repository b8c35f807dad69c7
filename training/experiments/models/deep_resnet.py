"""The residual networks of 18, 34, 50, 101 and 152 layers, for large images and for small ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pathspace.errors import InputError

# layers -> blocks of the four stages; from 50 layers on a block has three convolutions
BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
# channels that leave a block of three convolutions, in those of its inner ones
EXPANSION = 4


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class DeepBlock(nn.Module):
    """``relu(skip(x) + branch(x))``, a branch of two or three convolutions with batch norm.

    Where the shape changes the skip is a convolution of 1 x 1 (option B of the original paper).

    Args:
        inputs: channels that enter.
        width: channels inside.
        stride: 1, or 2 to halve the image.
        deep: three convolutions, the last of which has four times the channels, and the second the
            stride.

    Example:
        >>> DeepBlock(4, 8, 2, deep=True)(torch.zeros(2, 4, 8, 8)).shape
        torch.Size([2, 32, 4, 4])
    """

    def __init__(self, inputs: int, width: int, stride: int, deep: bool) -> None:
        super().__init__()
        outputs = EXPANSION * width if deep else width
        if deep:
            layers = [
                *_convolution(inputs, width, 1),
                nn.ReLU(),
                *_convolution(width, width, 3, stride),
                nn.ReLU(),
                *_convolution(width, outputs, 1),
            ]
        else:
            layers = [
                *_convolution(inputs, width, 3, stride),
                nn.ReLU(),
                *_convolution(width, width, 3),
            ]
        self.branch = nn.Sequential(*layers)
        same = stride == 1 and inputs == outputs
        self.skip = nn.Sequential(*(() if same else _convolution(inputs, outputs, 1, stride)))

    def forward(self, stream: Tensor) -> Tensor:
        """Map (B, inputs, Y, X) to (B, outputs, Y / stride, X / stride)."""
        return torch.relu(self.skip(stream) + self.branch(stream))


class DeepResNet(nn.Module):
    """A stem, four stages of :class:`DeepBlock` (widths 1, 2, 4, 8 times ``width``) and a linear
    read-out.

    Args:
        depth: layers, a key of :data:`BLOCKS`.
        channels: channels of the images.
        width: channels of the first stage, 64 in the original.
        outputs: scores per image.
        small: for images of 32 pixels: the stem has a kernel of 3 x 3 and halves nothing, in place
            of 7 x 7 and two halvings.

    Raises:
        InputError: there is no network of this depth.

    Reference:
        He et al., Deep residual learning for image recognition, Table 1; Learnable Markov chain
        paper, Tables 2 and 3.

    Example:
        >>> sum(p.numel() for p in DeepResNet(18).parameters())
        11689512
    """

    def __init__(
        self,
        depth: int = 50,
        channels: int = 3,
        width: int = 64,
        outputs: int = 1000,
        small: bool = False,
    ) -> None:
        super().__init__()
        if depth not in BLOCKS:
            raise InputError(
                f"A deep residual network of {depth} layers does not exist; give one of:"
                f" {', '.join(map(str, BLOCKS))}."
            )
        deep, before = depth >= 50, width
        stem = _convolution(channels, width, 3 if small else 7, 1 if small else 2)
        self.stem = nn.Sequential(
            *stem, nn.ReLU(), *(() if small else (nn.MaxPool2d(3, 2, padding=1),))
        )
        stages: list[nn.Module] = []
        for stage, blocks in enumerate(BLOCKS[depth]):
            inner = width * 2**stage
            for block in range(blocks):
                stages.append(DeepBlock(before, inner, 2 if stage and not block else 1, deep))
                before = EXPANSION * inner if deep else inner
        self.blocks = nn.Sequential(*stages)
        self.readout = nn.Linear(before, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, channels, Y, X) to scores of shape (B, outputs)."""
        result: Tensor = self.readout(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return result
