"""What the penal connection and the observer cost: whole training steps and memory,
against the paper's hook.

The models mark their directions themselves (`mark` is the identity unless a contender puts the
paper's hook, or :func:`pathspace.training.penal.penal`, in its place), so that each contender pays
for its own way of finding them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.measure import Clock
from pathspace.diagnostics import MarkovChain
from pathspace.training import penalise_
from pathspace.training.penal import penal

TAU = 3e-4
Mark = Callable[[Tensor], Tensor]


def unmarked(direction: Tensor) -> Tensor:
    """Leave the direction alone."""
    return direction


def paper_hook(direction: Tensor) -> Tensor:
    """Algorithm 1 of the paper as printed: a hook that adds `tau z`, with a clone of z."""
    if direction.requires_grad:
        kept = direction.detach().clone()
        direction.register_hook(lambda gradient: gradient + TAU * kept)
    return direction


class Encoder(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.mark: Mark = unmarked
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.mark(self.attention(y, y, y, need_weights=False)[0])
        return x + self.mark(self.mlp(self.second(x)))


class Block(models.Block):
    """The residual block of the other benchmarks, ReLU after the sum."""

    mark: Mark = staticmethod(unmarked)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.mark(self.body(x)))


def transformer(width: int, layers: int, batch: int, length: int = 128) -> tuple[nn.Module, Tensor]:
    """Pre-norm transformer on random sequences."""
    blocks = [Encoder(width, width // 64) for _ in range(layers)]
    model = nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, 10))
    return model, torch.randn(batch, length, width)


def residual_cnn() -> tuple[nn.Module, Tensor]:
    """Six blocks of 64 channels on 16 images of 32 x 32."""
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    blocks = [Block(64) for _ in range(6)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return model, torch.randn(16, 3, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "prenorm_transformer_256": partial(transformer, 256, 6, 8),
    "prenorm_transformer_512": partial(transformer, 512, 6, 4),
    "residual_cnn_64": residual_cnn,
}


def marked(model: nn.Module, mark: Mark) -> nn.Module:
    """Put a marker into every block."""
    for module in model.modules():
        if isinstance(module, Encoder | Block):
            module.mark = mark
    return model


def kept(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes alive between forward and backward: what autograd saved, and what hooks hold."""
    own = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return value

    # what is there before is set aside: a search through every object of a long
    # run of tests takes seconds
    gc.freeze()
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            loss = run()
        for value in gc.get_objects():
            # (`isinstance` would ask the class of every object, and some answer with a warning)
            if issubclass(type(value), Tensor):
                note(value)
    finally:
        gc.unfreeze()
    assert loss.requires_grad
    return sum(size for pointer, size in saved.items() if pointer not in own)


def penalty(name: str, threads: int, rounds: int = 12) -> dict[str, Any]:
    """Training steps of one model: plain (twice, for the noise), and each contender."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model, x = MODELS[name]()
    chain_model = copy.deepcopy(model)
    contenders: dict[str, nn.Module] = {
        "plain": model,
        "again": copy.deepcopy(model),
        "penalize": penalise_(copy.deepcopy(model), x, tau=TAU),
        "penal": marked(copy.deepcopy(model), lambda z: penal(z, TAU)),
        "hook": marked(copy.deepcopy(model), paper_hook),
        "watch": chain_model,
    }
    chain = MarkovChain.trace(chain_model, x)
    optimizers = {key: torch.optim.SGD(one.parameters(), lr=0.0) for key, one in contenders.items()}

    def around(key: str) -> contextlib.AbstractContextManager[Any]:
        # a watch of its own for each step: what it has recorded before is not part of a step
        return chain.watch() if key == "watch" else contextlib.nullcontext()

    clock = Clock("cpu", threads)
    times: dict[str, list[float]] = {key: [] for key in contenders}
    order = list(contenders)
    for turn in range(rounds + 1):
        # each contender follows each other one in turn, so that none profits
        # from its neighbour's caches
        for key in order[turn % len(order) :] + order[: turn % len(order)]:
            with around(key):
                start = clock()
                optimizers[key].zero_grad()
                contenders[key](x).square().mean().backward()
                optimizers[key].step()
                times[key].append(clock() - start)
    # ratios within a round, because the machine drifts from one to the next
    ratios = {
        key: [a / b for a, b in zip(times[key], times["plain"], strict=True)] for key in order[1:]
    }
    over = {key: statistics.median(values[1:]) for key, values in ratios.items()}
    memory = {}
    for key, one in contenders.items():
        if key != "again":
            with around(key):
                memory[key] = kept(one, lambda one=one: one(x).square().mean()) / 2**20  # type: ignore[misc]
    return {
        "model": name,
        "step_ms": 1000 * statistics.median(times["plain"][1:]),
        "plain/plain": over["again"],
        **{f"{key}/plain": over[key] for key in order[2:]},
        **{f"{key}_MiB": value for key, value in memory.items()},
        "threads": threads,
        "load": round(os.getloadavg()[0], 1),
    }
