"""Networks, optimizers and loops for tests of the canonical gauge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.training.experiments.models import CharacterGPT, CifarResNet, VisionTransformer

Build = Callable[[], tuple[nn.Module, Tensor, Tensor]]


def with_images(model: nn.Module, size: int) -> tuple[nn.Module, Tensor, Tensor]:
    images = torch.randn(40, 1, size, size)
    return model.double(), images.double(), torch.arange(40) % 3


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    layers = nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.LeakyReLU(0.1), nn.Linear(6, 3)
    return nn.Sequential(*layers).double(), torch.randn(40, 5).double(), torch.randint(0, 3, (40,))


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    first = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    return with_images(nn.Sequential(*first, *second), 8)


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    return with_images(CifarResNet(8, channels=1, width=3, outputs=3), 6)


def vit() -> tuple[nn.Module, Tensor, Tensor]:
    return with_images(VisionTransformer(size=6, patch=3, width=8, outputs=3), 6)


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(0, 7, (40, 6))
    return CharacterGPT(7, 6, width=8).double(), tokens, (tokens * 2 + 1) % 7


BUILDS: dict[str, Build] = {build.__name__: build for build in (mlp, cnn, resnet, vit, gpt)}


class Lion(torch.optim.Optimizer):
    """Written by hand: the sign of an average."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.sign(0.9 * average + 0.1 * p.grad))
                average.lerp_(p.grad, 0.01)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=3e-3, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, weight_decay=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5),
    "lion": lambda m: Lion(m.parameters(), lr=1e-3),
    # (the first sums are constants, whatever the scales of the weights)
    "adagrad": lambda m: torch.optim.Adagrad(
        m.parameters(), lr=0.02, initial_accumulator_value=0.1
    ),
    "muon": muon,
}


def scrambled(
    model: nn.Module, graph: ps.ReductionGraph, largest: float = 100.0, seed: int = 0
) -> nn.Module:
    """A copy, rescaled by factors between ``1 / largest`` and ``largest``."""
    twin = copy.deepcopy(model)
    random = torch.rand(
        graph.num_units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return ps.rescale_(twin, graph, (2 * random - 1) * np.log(largest))


def train(
    model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, steps: int, clip: float | None = None
) -> np.ndarray:
    losses = []
    for step in range(steps):
        some = slice(8 * step % 40, 8 * step % 40 + 8)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[some]).flatten(0, -2), y[some].flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def made(build: Build, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    return build()
