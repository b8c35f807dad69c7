"""Models that benchmarks share."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from zoo import vision

from pathspace.training.experiments.models import CharacterGPT, ReluRNN


def vgg16() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """VGG-16: 138,357,544 weights."""
    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
    return vision.vgg(widths), (torch.randn(1, 3, 224, 224),)


def small_rnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """RNN 28-100-10, 28 steps, batch 64: the paper's digits experiment."""
    return ReluRNN(28, 100, 10), (torch.randn(64, 28, 28),)


def stacked_rnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Four layers of 1550 units on inputs of 400 (the paper's), 16 steps, batch 16."""
    return ReluRNN(400, 1550, 400, layers=4), (torch.randn(16, 16, 400),)


class Block(nn.Module):
    """Two convolutions around a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        norms = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.body = nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def residual_cnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A residual CNN with batch norm on 32 x 32 images, batch 64."""
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*stem, *(Block(64) for _ in range(6)), *tail)
    return model, (torch.randn(64, 3, 32, 32),)


class RecurrentConvolution(nn.Module):
    """A convolution that recurs at every position: `x_t = relu(F u + R x_{t-1})`."""

    def __init__(self, channels: int, steps: int = 3) -> None:
        super().__init__()
        self.forth = nn.Conv2d(channels, channels, 3, padding=1)
        self.back = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.steps = steps

    def forward(self, u: Tensor) -> Tensor:
        u = self.forth(u)
        x = torch.relu(u)
        for _ in range(self.steps):
            x = torch.relu(u + self.back(x))
        return x


def recurrent_cnn(channels: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A recurrent CNN of four such layers after one convolution, on 32 x 32 images, batch 8."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 5, padding=2), nn.ReLU()]
    for _ in range(2):
        layers += [nn.MaxPool2d(3, 2), *(RecurrentConvolution(channels) for _ in range(2))]
    tail = [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers, *tail), (torch.randn(8, 3, 32, 32),)


recurrent_cnn_96, recurrent_cnn_160 = (partial(recurrent_cnn, size) for size in (96, 160))


def resnet18() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-18 on images of 224 x 224, batch 32: 11,689,512 weights."""
    return vision.resnet("basic", (2, 2, 2, 2)), (torch.randn(32, 3, 224, 224),)


def resnet18_small() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The same on images of 64 x 64."""
    return resnet18()[0], (torch.randn(32, 3, 64, 64),)


def gpt_10m() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A character GPT of 6 layers with 384 features, 8 texts of 128: 10,746,624 weights."""
    return CharacterGPT(65, 128, width=384, heads=6, layers=6), (torch.randint(0, 65, (8, 128)),)
