"""Path norms over forward passes, in processor time: ``python -m
benchmarks.path_norms [SIZE]`` in ``tests/``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zoo import vision

import pathspace as ps

MODELS: dict[str, Callable[[], nn.Module]] = {
    "alexnet": lambda: vision.alexnet()[0],
    "vgg11_bn": lambda: vision.vgg(vision.VGG11, norms=True),
    "resnet50": lambda: vision.resnet("bottleneck", (3, 4, 6, 3)),
    "densenet121": lambda: vision.densenet()[0],
}


def seconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """The least processor time of several calls."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return min(times)


def ratio(name: str, size: int = 224, p: float = 1) -> float:
    """Processor time of one path norm over that of one forward pass on the same input."""
    torch.manual_seed(0)
    model, x = MODELS[name]().eval(), torch.randn(1, 3, size, size)
    graph = ps.trace(model, x)
    with torch.no_grad():
        forward = seconds(lambda: model(x))
    return seconds(lambda: graph.path_norm(p, log=True)) / forward


if __name__ == "__main__":
    for chosen in MODELS:
        print(
            chosen, *(round(ratio(chosen, int((sys.argv[1:] or ["224"])[0]), p), 2) for p in (1, 2))
        )
