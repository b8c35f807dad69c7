"""Recipes: optimizer, starting point and learning rate; and how to set them up."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

import pathspace as ps
from pathspace.errors import InputError, expect_numbers
from pathspace.paths.skeleton import Skeleton

from ..init_skeleton import init_skeleton_
from ..optim import GSGD, GAdam
from ..path_sgd import PathSGD
from .names import expect_known
from .recurrent_part import recurrent_gsgd, recurrent_path_sgd
from .task import Task

Rule = Literal["modulo", "magnitude", "random"]
Init = Literal["default", "unit-skeleton"]
# Optimizers of torch that ask for the loss several times in a step, or for sparse gradients.
UNFIT = ("LBFGS", "SparseAdam")


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that users choose by name: what makes it from model, rate, skeleton and example
    inputs; default rate and start; default weight decay, ``None`` where it has none.
    """

    make: Callable[[nn.Module, float, Skeleton | None, tuple[Tensor, ...]], torch.optim.Optimizer]
    lr: float
    init: Init = "default"
    decay: float | None = 0.0
    needs_skeleton: bool = False


def _of_torch(kind: Any, model: nn.Module, lr: float, *_: Any, **options: Any) -> Any:
    try:
        return kind(model.parameters(), lr=lr, **options)
    except ValueError as error:
        raise InputError(
            f"torch's {kind.__name__} refuses this model ({error}); choose another optimizer."
        ) from error


def _on_paths(
    kind: Any, model: nn.Module, lr: float, skeleton: Skeleton | None, _: Any, **options: Any
) -> Any:
    return kind(model.named_parameters(), lr=lr, skeleton=skeleton, **options)


def _path_sgd(
    model: nn.Module, lr: float, _: Skeleton | None, example: tuple[Tensor, ...]
) -> torch.optim.Optimizer:
    # One sample, so that the path norm does not grow with the batch. The second term of kappa costs
    # a pass per recurrent weight and is, for common initialisations, a thousandth of the first; the
    # published code omits it.
    one = tuple(value[:1] for value in example)
    return PathSGD(model.named_parameters(), lr=lr, model=model, example=one, second=False)


def _on_part(make: Any) -> Any:
    return lambda model, lr, _, example: make(model, lr, example)


_UNIT: Init = "unit-skeleton"
OPTIMIZERS = {
    "gsgd": OptimizerKind(partial(_on_paths, GSGD), 0.05, _UNIT, needs_skeleton=True),
    "gmomentum": OptimizerKind(
        partial(_on_paths, GSGD, momentum=0.9), 0.01, _UNIT, needs_skeleton=True
    ),
    "gadam": OptimizerKind(partial(_on_paths, GAdam), 0.002, _UNIT, needs_skeleton=True),
    "sgd": OptimizerKind(partial(_of_torch, torch.optim.SGD), 0.05),
    "momentum": OptimizerKind(partial(_of_torch, torch.optim.SGD, momentum=0.9), 0.02),
    "adam": OptimizerKind(partial(_of_torch, torch.optim.Adam), 0.002),
    "path-sgd": OptimizerKind(_path_sgd, 0.5, _UNIT, None),
    "recurrent-gsgd": OptimizerKind(_on_part(recurrent_gsgd), 0.05, _UNIT),
    "recurrent-path-sgd": OptimizerKind(_on_part(recurrent_path_sgd), 0.05, _UNIT, None),
}


def optimizer_kind(name: str) -> OptimizerKind:
    """Find an optimizer: one of ``OPTIMIZERS``, or torch's by its class name."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    base = torch.optim.Optimizer
    kinds = {kind.__name__: kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    fit = sorted(n for n, k in kinds.items() if issubclass(k, base) and k is not base)
    expect_known("optimizer", name, (*OPTIMIZERS, *(n for n in fit if n not in UNFIT)))
    found = inspect.signature(kinds[name]).parameters
    decay = found["weight_decay"].default if "weight_decay" in found else None
    return OptimizerKind(partial(_of_torch, kinds[name]), found["lr"].default, decay=decay)


@dataclass(frozen=True)
class Recipe:
    """How a model is initialised and optimised; ``None`` takes the optimizer's own default.

    The step of G-SGD multiplies the learning rate of an edge ``u -> v`` by ``1 / (pre(u) s(v))^2``,
    as large as 1e13 with common initialisations. With ``init="unit-skeleton"`` skeleton weights are
    +1 or -1 and multipliers 1: another initial function, from which a fair comparison starts
    others, too. ``decay`` is of path values for optimizers on those.
    """

    optimizer: str = "gsgd"
    lr: float | None = None
    init: Init | None = None
    rule: Rule = "modulo"
    seed: int = 0
    decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        kind = optimizer_kind(self.optimizer)
        # replace defaults by their values, so that every record of a run states them
        # (the dataclass is frozen)
        object.__setattr__(self, "lr", kind.lr if self.lr is None else self.lr)
        object.__setattr__(self, "init", self.init or kind.init)
        object.__setattr__(self, "decay", (kind.decay or 0.0) if self.decay is None else self.decay)
        expect_known("skeleton rule", self.rule, get_args(Rule))
        expect_known("starting point", str(self.init), get_args(Init))
        expect_numbers("Recipe", "a positive number", lr=self.lr)
        expect_numbers("Recipe", "a positive number", or_none=True, eps=self.eps)
        expect_numbers("Recipe", "a number of at least 0", decay=self.decay)
        for beta in self.betas or ():
            expect_numbers("Recipe", "a number of at least 0 and below 1", betas=beta)
        if self.decay and kind.decay is None:
            raise InputError(
                f"The optimizer {self.optimizer} has no weight decay; leave it out, or choose"
                " another."
            )

    @property
    def needs_skeleton(self) -> bool:
        """Whether this recipe needs the reduction graph."""
        return optimizer_kind(self.optimizer).needs_skeleton or self.init == "unit-skeleton"

    def settings(self) -> dict[str, Any]:
        """Return the plain values that identify a run, without those that have no effect."""
        used = {"rule": self.needs_skeleton, "decay": bool(self.decay)}
        used |= {"betas": self.betas is not None, "eps": self.eps is not None}
        return {k: v for k, v in asdict(self).items() if used.get(k, True)}


def find_skeleton(task: Task, recipe: Recipe) -> Skeleton:
    """Trace a new model of the task and choose its skeleton."""
    graph = ps.trace(task.make_model(recipe.seed), *task.example_inputs())
    return graph.skeleton(rule=recipe.rule, seed=recipe.seed)


def prepare(task: Task, recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Create the model of a task, set its starting point and create its optimizer."""
    model = task.make_model(recipe.seed)
    skeleton = find_skeleton(task, recipe) if recipe.needs_skeleton else None
    if recipe.init == "unit-skeleton" and skeleton is not None:
        init_skeleton_(model, skeleton)
    kind = optimizer_kind(recipe.optimizer)
    optimizer = kind.make(model, float(recipe.lr or kind.lr), skeleton, task.example_inputs())
    given = {"betas": recipe.betas, "eps": recipe.eps}
    given = {name: value for name, value in given.items() if value is not None}
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = recipe.decay
        for name in given.keys() - group.keys():
            raise InputError(
                f"The optimizer {recipe.optimizer} has no {name}; leave it out, or choose"
                " another, such as adam."
            )
        group.update(given)
    return model, optimizer


MARGIN = 4


def crop_and_flip(images: Tensor) -> Tensor:
    """Shift each image by up to four pixels, zeros at the border; mirror half of the images."""
    if images.dim() != 4:
        raise InputError(
            f"The augmentation crop-flip found examples of shape {tuple(images.shape[1:])},"
            " expected images of shape (channels, Y, X); leave it out, or choose a task of images."
        )
    count, _, height, width = images.shape
    padded = functional.pad(images, (MARGIN,) * 4)
    up, left = torch.randint(2 * MARGIN + 1, (2, count))
    rows = up[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    mirrored = torch.rand(count) < 0.5
    columns[mirrored] = columns[mirrored].flip(1)
    place = torch.arange(count)[:, None, None]
    # (B, Y, X, channels): indices beside a slice come first
    moved = padded[place, :, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


def augmentation(name: str) -> Callable[[Tensor], Tensor] | None:
    """Return the augmentation of this name, ``None`` for ``none``."""
    expect_known("augmentation", name, ("none", "crop-flip"))
    return crop_and_flip if name == "crop-flip" else None


Factor = Callable[[float], float]
NAMES = "constant, constant W, linear, linear W, cosine, cosine W, drops AT AT ..., inverse-root W"


def schedule(name: str) -> Factor | None:
    """Return the factor of every learning rate, as a function of the completed share of a run."""
    kind, *words = name.split() or [""]
    try:
        shares = [float(word) for word in words]
    except ValueError:
        shares = [math.nan]
    right = all(0 <= share < 1 for share in shares)
    if kind == "drops" and shares and right:
        return lambda share: 0.1 ** sum(share >= at for at in shares)
    if kind == "constant" and not shares:
        return None
    warm = shares[0] if shares else 0.0
    after: dict[str, Factor] = {
        "constant": lambda _: 1.0,
        "linear": lambda x: (1 - x) / (1 - warm),
        "cosine": lambda x: (1 + math.cos(math.pi * (x - warm) / (1 - warm))) / 2,
        "inverse-root": lambda x: math.sqrt(warm / x),
    }
    if kind not in after or len(shares) > 1 or not right or (kind == "inverse-root" and not warm):
        raise InputError(
            f"There is no schedule '{name}'; choose one of: {NAMES}, with shares W, AT of the run."
        )
    return lambda share: share / warm if share < warm else after[kind](share)
