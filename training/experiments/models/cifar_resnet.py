"""The residual networks for small images: 20, 32, 44, 56 layers, that is 3,
5, 7, 9 blocks per stage.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pathspace.errors import InputError

from ...penal import penal


class BasicBlock(nn.Module):
    """``relu(skip(x) + norm(V relu(norm(U x))))`` with 3 x 3 kernels.

    Where the image is halved the skip takes every second pixel and pads the new channels with
    zeros, so that it has no parameters (option A of the original paper).

    Args:
        inputs: channels that enter.
        width: channels that leave.
        stride: 1, or 2 to halve the image.
        scale: first value of a learned factor for each channel of the branch
            (LayerScale); ``None`` for none.
        drop: share of the samples whose branch is dropped in a training step (stochastic depth).
        activity: strength of a penalty ``activity/2 ||a||^2`` on the outputs of the activations.

    Example:
        >>> BasicBlock(4, 8, 2)(torch.zeros(2, 4, 8, 8)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        scale: float | None = None,
        drop: float = 0.0,
        activity: float = 0.0,
    ) -> None:
        super().__init__()
        self.enter = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.inner_norm = nn.BatchNorm2d(width)
        self.leave = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.outer_norm = nn.BatchNorm2d(width)
        self.stride, self.added, self.drop, self.activity = stride, width - inputs, drop, activity
        self.scale = None if scale is None else nn.Parameter(torch.full((width, 1, 1), scale))

    def forward(self, stream: Tensor) -> Tensor:
        """Map (B, inputs, Y, X) to (B, width, Y / stride, X / stride)."""
        branch = self.outer_norm(self.leave(self._activated(self.inner_norm(self.enter(stream)))))
        if self.scale is not None:
            branch = branch * self.scale
        if self.training and self.drop:
            branch = (
                branch
                * branch.new_empty(len(branch), 1, 1, 1).bernoulli_(1 - self.drop)
                / (1 - self.drop)
            )
        if self.stride > 1 or self.added:
            stream = functional.pad(
                stream[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added)
            )
        return self._activated(stream + branch)

    def _activated(self, sums: Tensor) -> Tensor:
        outputs = torch.relu(sums)
        return penal(outputs, self.activity) if self.activity else outputs


class CifarResNet(nn.Module):
    """A stem, three stages of :class:`BasicBlock` (widths 1, 2, 4 times
    ``width``) and a linear read-out.

    Args:
        depth: ``6 n + 2`` layers; n blocks per stage.
        channels: channels of the images.
        width: channels of the first stage, 16 in the original.
        outputs: scores per image.
        **more: further settings of the blocks.

    Raises:
        InputError: ``depth`` is not ``6 n + 2``.

    Reference:
        He et al., Deep residual learning for image recognition, section 4.2; Learnable
        Markov chain paper, Table 3.

    Example:
        >>> sum(p.numel() for p in CifarResNet(20).parameters())
        269722
    """

    def __init__(
        self, depth: int = 20, channels: int = 3, width: int = 16, outputs: int = 10, **more: float
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError(
                f"A residual network of depth {depth} does not exist; give 6 n + 2, such as 20"
                " or 56."
            )
        blocks, before = (depth - 2) // 6, width
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages: list[nn.Module] = []
        for stage in range(3):
            after = width * 2**stage
            for block in range(blocks):
                stages.append(BasicBlock(before, after, 2 if stage and not block else 1, **more))
                before = after
        self.blocks = nn.Sequential(*stages)
        self.readout = nn.Linear(before, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, channels, Y, X) to scores of shape (B, outputs)."""
        result: Tensor = self.readout(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return result
