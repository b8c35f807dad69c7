"""One run of the leaderboard of optimizers: a task, a start, a contender, a rate and a seed."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Muon, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

import pathspace as ps
from pathspace.errors import InputError, PathspaceError

from ...init_skeleton import init_skeleton_
from ...optim import GSGD, GAdam, GaugeFixed
from ...optim.matching import movable
from ...optim.shell import Shell
from ...path_sgd import PathSGD
from ..adapters import LoRARite, lora_plus
from ..data import given, source
from ..models import CharacterGPT, CifarResNet, VisionTransformer
from ..task import Split, one_thread
from ..tasks.digits import image_splits
from ..tasks.fetched import bible_tokens
from ..tasks.papers import mnist_splits
from ..tasks.text import chunks, token_loss, topics_tokens
from .trial import run_key, splits_digest

BATCH = {"embedded": 32, "fetched": 64}
# (narrower networks need more steps to pass a linear model)
WIDTH, RANK = {"embedded": 32, "fetched": 128}, {"embedded": 8, "fetched": 16}
LENGTH = 32
# (steps on upright images, before adapters are trained on turned ones)
UPRIGHT = 200
# 12,800 characters to test
CHUNKS = {"embedded": (4000, 200, 200), "fetched": (None, 200, 400)}
Splits = Sequence[Split]


@cache
def images(scale: str) -> Splits:
    """Images of ten classes: digits of 8 x 8 pixels, or clothes of 14 x 14."""
    if scale == "embedded":
        return image_splits()
    parts = mnist_splits(given("optimizers", None, "fashion-mnist"))
    return [Split(functional.avg_pool2d(part.inputs, 2), part.targets) for part in parts]


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
    cut = zip(parts, CHUNKS[scale], strict=True)
    return [chunks(part, LENGTH, limit) for part, limit in cut], size


def _turned(scale: str) -> Splits:
    return [Split(part.inputs.rot90(1, (2, 3)), part.targets) for part in images(scale)]


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


SIMPLE = "linear model"
STARTS = ("default", "scrambled 100", "scrambled 10", "unit skeleton")
# rates that only such starts need
LOWER = 3


def _muon(model: nn.Module, lr: float) -> list[Optimizer]:
    """Muon for matrices, AdamW at a tenth of the rate for everything else."""
    matrices, rest = (
        [p for p in _trained(model) if (p.dim() == 2) is wanted] for wanted in (True, False)
    )
    return [Muon(matrices, lr=lr), *([AdamW(rest, lr=0.1 * lr)] if rest else [])]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _adamw(model: nn.Module, lr: float) -> AdamW:
    return AdamW(_trained(model), lr=lr)


def _sgd(model: nn.Module, lr: float) -> SGD:
    return SGD(_trained(model), lr=lr, momentum=0.9)


def _conditioned_adamw(model: nn.Module, graph: ps.ReductionGraph, lr: float) -> Optimizer:
    ps.rescale_(model, graph, ps.choose_gauge(model, graph, ps.Conditioning()))
    return _adamw(model, lr)


Maker = Callable[[nn.Module, ps.ReductionGraph, float], Optimizer]
Inner = Callable[[nn.Module, float], Any]


def _gauge_fixed(inner: Inner, norms: str = "unit") -> Maker:
    return lambda m, g, lr: GaugeFixed(inner(m, lr), g, model=m, norms=norms)


def _on_paths(kind: Any, **options: Any) -> Maker:
    return lambda m, g, lr: kind(
        m.named_parameters(), lr=lr, skeleton=g.skeleton("magnitude"), **options
    )


def _path_sgd(model: nn.Module, _graph: ps.ReductionGraph, lr: float) -> Optimizer:
    inputs = next(layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear))
    return PathSGD(
        model.named_parameters(),
        lr=lr,
        model=model,
        example=(torch.zeros(1, inputs),),
        second=False,
    )


def _pairs(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    named = [*model.named_parameters()]
    up, down = ([p for name, p in named if name.startswith(side)] for side in ("up", "down"))
    return list(zip(up, down, strict=True))


def _lora_plus(model: nn.Module, lr: float) -> AdamW:
    return lora_plus(_pairs(model), lr)


# contender -> the lowest of its rates, and its optimizer
ARMS: dict[str, tuple[float, Maker]] = {
    "SGD": (1e-3, lambda m, _g, lr: _sgd(m, lr)),
    "AdamW": (1e-4, lambda m, _g, lr: _adamw(m, lr)),
    "RMSProp": (3e-5, lambda m, _g, lr: RMSprop(_trained(m), lr=lr)),
    "Muon": (1e-3, lambda m, _g, lr: Shell(_muon(m, lr))),
    "gauge-fixed SGD": (1e-3, _gauge_fixed(_sgd)),
    "gauge-fixed AdamW": (1e-4, _gauge_fixed(_adamw)),
    "gauge-fixed AdamW, norms by tensor": (1e-4, _gauge_fixed(_adamw, "tensor")),
    "gauge-fixed AdamW, initial norms": (1e-4, _gauge_fixed(_adamw, "initial")),
    "gauge-fixed Muon": (1e-3, _gauge_fixed(_muon)),
    "balanced start, AdamW": (1e-4, lambda m, g, lr: _adamw(ps.balance_(m, g), lr)),
    "conditioned start, AdamW": (1e-4, _conditioned_adamw),
    "G-SGD, bound 1": (1e-3, _on_paths(GSGD, max_multiplier=1.0)),
    "G-Adam": (1e-5, _on_paths(GAdam)),
    "G-Adam, bound 1": (1e-4, _on_paths(GAdam, max_multiplier=1.0)),
    "Path-SGD": (3e-3, _path_sgd),
    "LoRA+": (1e-5, lambda m, _g, lr: _lora_plus(m, lr)),
    "gauge-fixed LoRA+": (1e-5, _gauge_fixed(_lora_plus)),
    "LoRA-RITE": (3e-4, lambda m, _g, lr: LoRARite(_pairs(m), lr)),
    # (trained by AdamW as AdamW is, for as long)
    SIMPLE: (1e-3, lambda m, _g, lr: AdamW(m.parameters(), lr=lr)),
}
# Path-SGD and conditioning take sums over paths only: no norms or attention,
# Path-SGD no maxima either
ONLY = {
    "Path-SGD": ("MLP",),
    "conditioned start, AdamW": ("MLP", "CNN", "adapters"),
    "LoRA+": ("adapters",),
    "gauge-fixed LoRA+": ("adapters",),
    "LoRA-RITE": ("adapters",),
    "gauge-fixed AdamW, norms by tensor": ("batch-norm ResNet",),
    "gauge-fixed AdamW, initial norms": ("batch-norm ResNet",),
}


def rates(arm: str, start: str = STARTS[0]) -> tuple[float, ...]:
    """Eight rates, by factors of about three, and three lower ones from starts scrambled most."""
    lower = LOWER if start == STARTS[1] else 0
    return tuple(
        float(f"{ARMS[arm][0] * 10.0 ** (place // 2) * (3 if place % 2 else 1):.3g}")
        for place in range(-lower, 8)
    )


@dataclass(frozen=True)
class Run:
    """A run, named completely; its rate falls to 0 in a straight line."""

    task: str
    start: str
    arm: str
    lr: float
    seed: int
    steps: int = 150
    scale: str = "embedded"

    @property
    def data(self) -> str:
        """A digest of its data."""
        return run_data(self.task, self.scale)

    @property
    def key(self) -> str:
        """A name that no other run has: its settings and its data."""
        return run_key(asdict(self), self.data)

    @property
    def label(self) -> str:
        """What a progress bar says of it."""
        return f"{self.task} {self.arm} lr {self.lr:g}"

    def carry_out(self, _folder: Path | None = None) -> Result:
        """Train: :func:`carry_out`; it is too short for checkpoints."""
        return carry_out(self)

    def outcome(self, values: dict[str, Any]) -> Result:
        """Read the plain values of a result."""
        told: dict[str, Any] = {k: math.nan if v is None else v for k, v in values.items()}
        return Result(**told)


@cache
def run_data(task: str, scale: str) -> str:
    """A digest of the data of a task."""
    return splits_digest(TASKS[task][1](scale))


@dataclass(frozen=True)
class Result:
    """The result of a run. It fails if a loss stops being finite, if that on validation data ends
    above where it began, or if the optimizer refuses the network.
    """

    valid: float
    test: float
    error: float
    failed: bool
    reason: str
    seconds: float


@cache
def graph_of(task: str, scale: str) -> ps.ReductionGraph:
    """The reduction graph of a task's network."""
    with torch.random.fork_rng(devices=[]):
        build, data = TASKS[task]
        return ps.trace(build(scale), data(scale)[0].inputs[:2])


def prepared(run: Run) -> tuple[nn.Module, ps.ReductionGraph]:
    """The network of a run at its start, and its reduction graph."""
    torch.manual_seed(run.seed)
    graph = graph_of(run.task, run.scale)
    if run.arm == SIMPLE:
        return linear_model(run.task, run.scale), graph
    model = TASKS[run.task][0](run.scale)
    graph = replace(graph, parameters=dict(model.named_parameters()))
    if run.start.startswith("scrambled"):
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        joined, turn = movable(graph, trained)
        logs = np.random.default_rng(run.seed).uniform(-1, 1, joined.num_units) * math.log(
            float(run.start.split()[1])
        )
        ps.rescale_(model, graph, torch.from_numpy(turn @ logs))
    elif run.start == "unit skeleton":
        init_skeleton_(model, graph.skeleton())
    return model, graph


def score(model: nn.Module, split: Split) -> tuple[float, float]:
    """Mean loss and error of a model on a split."""
    with torch.no_grad():
        outputs = torch.cat([model(some) for some in split.inputs.split(1000)])
        right = outputs.argmax(-1) == split.targets
        return float(_loss(outputs, split.targets)), 1 - float(right.double().mean())


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (
        token_loss(outputs, targets)
        if outputs.dim() == 3
        else functional.cross_entropy(outputs, targets)
    )


def carry_out(run: Run) -> Result:
    """Carry out a run, on one thread."""
    started = time.process_time()
    with one_thread(), warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
        model, graph = prepared(run)
        train, valid, test = TASKS[run.task][1](run.scale)
        before = score(model.train(), valid)[0]
        try:
            optimizer = ARMS[run.arm][1](model, graph, run.lr)
        except PathspaceError as error:
            spent = time.process_time() - started
            return Result(math.nan, math.nan, math.nan, True, str(error), spent)
        schedule = LambdaLR(optimizer, lambda step: 1 - step / run.steps)
        order = torch.Generator().manual_seed(run.seed)
        for _ in range(run.steps):
            some = torch.randint(0, len(train), (BATCH[run.scale],), generator=order)
            optimizer.zero_grad()
            loss = _loss(model(train.inputs[some]), train.targets[some])
            if not bool(loss.isfinite()):
                break
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        ends = score(model, valid)
        failed = not math.isfinite(ends[0]) or not bool(loss.isfinite()) or ends[0] > before
        tested = score(model, test)
    reason = "diverged" if failed else ""
    return Result(ends[0], tested[0], tested[1], failed, reason, time.process_time() - started)
