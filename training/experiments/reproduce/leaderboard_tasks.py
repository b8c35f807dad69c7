"""The leaderboard's tasks: networks and data, small enough for thousands of runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from pathspace.errors import InputError

from ..data import given, source
from ..models import CharacterGPT, CifarResNet, VisionTransformer
from ..task import Split
from ..tasks.digits import image_splits
from ..tasks.fetched import bible_tokens
from ..tasks.papers import mnist_splits
from ..tasks.text import chunks, topics_tokens

BATCH = {"embedded": 32, "fetched": 64}
# (narrower networks need more steps to pass a linear model)
WIDTH, RANK = {"embedded": 32, "fetched": 128}, {"embedded": 8, "fetched": 16}
LENGTH = 32
# (steps on upright images, before adapters are trained on turned ones)
UPRIGHT = 200
# 12,800 characters to test
CHUNKS = {"embedded": (4000, 200, 200), "fetched": (None, 200, 400)}
Splits = tuple[Split, Split, Split]


@cache
def images(scale: str) -> Splits:
    """Images of ten classes: digits of 8 x 8 pixels, or clothes of 14 x 14."""
    if scale == "embedded":
        return image_splits()
    first, second, third = (
        Split(functional.avg_pool2d(part.inputs, 2), part.targets)
        for part in mnist_splits(given("optimizers", None, "fashion-mnist"))
    )
    return first, second, third


@cache
def text(scale: str) -> tuple[Splits, int]:
    """Python's documentation or the King James Bible in chunks; its characters."""
    if scale == "embedded":
        parts, size = topics_tokens()
    else:
        parts, size = bible_tokens(given("optimizers", None, "bible"))
        if size != source("bible").symbols:
            raise InputError(
                f"Task 'optimizers' found {size} different characters in the King James Bible,"
                f" expected {source('bible').symbols}; run 'pathspace data fetch bible' again."
            )
    first, second, third = (
        chunks(part, LENGTH, limit) for part, limit in zip(parts, CHUNKS[scale], strict=True)
    )
    return (first, second, third), size


def _turned(scale: str) -> Splits:
    first, second, third = (
        Split(part.inputs.rot90(1, (2, 3)), part.targets) for part in images(scale)
    )
    return first, second, third


class Adapted(nn.Module):
    """A trained network, frozen, with adapters of low rank beside its inner layers."""

    def __init__(self, layers: nn.Sequential, rank: int) -> None:
        super().__init__()
        self.layers = layers.requires_grad_(False)
        inner = [layer for layer in layers if isinstance(layer, nn.Linear)][:-1]
        down = [torch.randn(rank, one.in_features) / one.in_features**0.5 for one in inner]
        self.down = nn.ParameterList(map(nn.Parameter, down))
        up = [torch.zeros(one.out_features, rank) for one in inner]
        self.up = nn.ParameterList(map(nn.Parameter, up))

    def forward(self, x: Tensor) -> Tensor:
        """Map images to scores."""
        adapters = zip(self.down, self.up, strict=True)
        for layer in self.layers:
            y = layer(x)
            if isinstance(layer, nn.Linear) and (adapter := next(adapters, None)):
                down, up = adapter
                y = y + x @ down.T @ up.T
            x = y
        return x


def _pixels(scale: str) -> int:
    return images(scale)[0].inputs[0].numel()


def _mlp(scale: str) -> nn.Sequential:
    width = WIDTH[scale]
    sizes = (_pixels(scale), width, width, width)
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def _cnn(scale: str) -> nn.Sequential:
    first = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    pixels, width = (math.isqrt(_pixels(scale)) // 4) ** 2, WIDTH[scale]
    read = nn.Flatten(), nn.Linear(16 * pixels, width), nn.ReLU(), nn.Linear(width, 10)
    return nn.Sequential(*first, *second, *read)


def _resnet(scale: str) -> CifarResNet:
    return CifarResNet(8, channels=1, width=4 if scale == "embedded" else 8)


def _vit(scale: str) -> VisionTransformer:
    if scale == "embedded":
        return VisionTransformer(8, 2, width=16)
    # (sixteen patches and a width of 16 end above a linear model after 600 steps,
    # with any of the contenders)
    return VisionTransformer(14, 7, width=32)


def _adapted(scale: str) -> Adapted:
    """A network trained on upright images; the task rotates them by 90 degrees."""
    layers, (train, _, _) = _mlp(scale), images(scale)
    optimizer = AdamW(layers.parameters(), lr=3e-3)
    for _ in range(UPRIGHT):
        some = torch.randint(0, len(train), (BATCH[scale],))
        optimizer.zero_grad()
        functional.cross_entropy(layers(train.inputs[some]), train.targets[some]).backward()
        optimizer.step()
    return Adapted(layers, RANK[scale])


def linear_model(task: str, scale: str) -> nn.Module:
    """A simple model for a task: linear in the image, or a table of pairs of characters."""
    if task == GPT:
        size = text(scale)[1]
        return nn.Embedding(size, size)
    return nn.Sequential(nn.Flatten(), nn.Linear(TASKS[task][1](scale)[0].inputs[0].numel(), 10))


GPT = "character GPT"
TASKS: dict[str, tuple[Callable[[str], nn.Module], Callable[[str], Splits]]] = {
    "MLP": (_mlp, images),
    "CNN": (_cnn, images),
    "adapters": (_adapted, _turned),
    "batch-norm ResNet": (_resnet, images),
    GPT: (lambda scale: CharacterGPT(text(scale)[1], LENGTH), lambda scale: text(scale)[0]),
    "ViT": (_vit, images),
}
# steps of a run, the same for all contenders: fewer where each costs more
STEPS = {
    "embedded": dict(zip(TASKS, (150, 150, 150, 80, 80, 200), strict=True)),
    "fetched": dict(zip(TASKS, (1000, 1200, 1800, 300, 800, 1200), strict=True)),
}


def chance(task: str, scale: str) -> float:
    """Loss of equal probabilities for all classes; a journal is read without the data."""
    if task != GPT:
        return math.log(10)
    return math.log(source("bible").symbols if scale == "fetched" else text(scale)[1])
