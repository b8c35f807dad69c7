"""The residual networks of He et al.: for small images, and for large ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pathspace.errors import InputError

from ...penal import penal

# layers of the networks for large images -> blocks of their four stages
BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
# from so many layers on a block has three convolutions, the last with so many times the channels
DEEP, EXPANSION = 50, 4


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Rectifier(nn.Module):
    """ReLU, with a penalty ``activity/2 ||a||^2`` on its outputs."""

    def __init__(self, activity: float = 0.0) -> None:
        super().__init__()
        self.activity = activity

    def forward(self, sums: Tensor) -> Tensor:
        """Map a tensor to one of the same shape."""
        outputs = torch.relu(sums)
        return penal(outputs, self.activity) if self.activity else outputs


class ResNetBlock(nn.Module):
    """``relu(skip(x) + branch(x))``, a branch of two or three convolutions with batch norm.

    A ``deep`` block has three, of which the second has the stride. Where the shape changes the skip
    is a convolution of 1 x 1 (``project``), or takes every second pixel and pads the new channels
    with zeros. ``scale`` is the first value of a learned factor for each channel of the branch
    (LayerScale), ``drop`` the share of the samples whose branch is dropped in a training step
    (stochastic depth).
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        deep: bool = False,
        project: bool = False,
        scale: float | None = None,
        drop: float = 0.0,
        activity: float = 0.0,
    ) -> None:
        super().__init__()
        self.outputs = EXPANSION * width if deep else width
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if deep:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, self.outputs, 1, 1)]
        layers = [
            layer for shape in shapes for layer in (*_convolution(*shape), Rectifier(activity))
        ]
        self.branch, self.rectifier = nn.Sequential(*layers[:-1]), layers[-1]
        self.stride, self.added, self.drop = stride, self.outputs - inputs, drop
        same = stride == 1 and not self.added
        self.skip = (
            nn.Sequential(*_convolution(inputs, self.outputs, 1, stride))
            if project and not same
            else None
        )
        self.scale = None if scale is None else nn.Parameter(torch.full((width, 1, 1), scale))

    def forward(self, stream: Tensor) -> Tensor:
        """Map (B, inputs, Y, X) to (B, outputs, Y / stride, X / stride)."""
        branch = self.branch(stream)
        if self.scale is not None:
            branch = branch * self.scale
        if self.training and self.drop:
            kept = 1 - self.drop
            branch = branch * branch.new_empty(len(branch), 1, 1, 1).bernoulli_(kept) / kept
        if self.skip is not None:
            stream = self.skip(stream)
        elif self.stride > 1 or self.added:
            every = stream[:, :, :: self.stride, :: self.stride]
            stream = functional.pad(every, (0, 0, 0, 0, 0, self.added))
        result: Tensor = self.rectifier(stream + branch)
        return result


class ResNet(nn.Module):
    """A stem, stages of blocks (widths 1, 2, 4, ... times ``width``), and a linear read-out."""

    def __init__(
        self,
        stem: Sequence[nn.Module],
        width: int,
        stages: Sequence[int],
        outputs: int,
        **settings: float,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*stem)
        blocks: list[nn.Module] = []
        before = width
        for stage, count in enumerate(stages):
            for place in range(count):
                stride = 2 if stage and not place else 1
                block = ResNetBlock(before, width * 2**stage, stride, **settings)  # type: ignore[arg-type]
                blocks.append(block)
                before = block.outputs
        self.blocks = nn.Sequential(*blocks)
        self.readout = nn.Linear(before, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, channels, Y, X) to scores of shape (B, outputs)."""
        result: Tensor = self.readout(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return result


class CifarResNet(ResNet):
    """The network of ``6 n + 2`` layers of He et al. for small images, section 4.2."""

    def __init__(
        self, depth: int = 20, channels: int = 3, width: int = 16, outputs: int = 10, **more: float
    ) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise InputError(
                f"A residual network of depth {depth} does not exist; give 6 n + 2, such as 20"
                " or 56."
            )
        stem = [*_convolution(channels, width, 3), nn.ReLU()]
        super().__init__(stem, width, [(depth - 2) // 6] * 3, outputs, **more)


class DeepResNet(ResNet):
    """The network of 18 to 152 layers of He et al., Table 1; with ``small``, for 32 pixels."""

    def __init__(
        self,
        depth: int = 50,
        channels: int = 3,
        width: int = 64,
        outputs: int = 1000,
        small: bool = False,
    ) -> None:
        if depth not in BLOCKS:
            raise InputError(
                f"A deep residual network of {depth} layers does not exist; give one of:"
                f" {', '.join(map(str, BLOCKS))}."
            )
        stem = [*_convolution(channels, width, 3 if small else 7, 1 if small else 2), nn.ReLU()]
        if not small:
            stem.append(nn.MaxPool2d(3, 2, padding=1))
        super().__init__(stem, width, BLOCKS[depth], outputs, deep=depth >= DEEP, project=True)


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
