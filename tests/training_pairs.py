"""What the tests of optimizers share: cases in float64 with a loss, copies moved
along the symmetry, training.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from descent import descend
from oracles.alignment import path_problem
from oracles.gsgd import PathProblem
from oracles.networks import Case
from torch import Tensor, nn
from training_cases import TRAINED

import pathspace as ps
from pathspace.training import GSGD, GAdam, init_skeleton_

Maker = Callable[[nn.Module], torch.optim.Optimizer]


def maker(kind: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Makes an optimizer of a model and its skeleton, with other settings if there are more."""

    def make(model: nn.Module, skeleton: ps.Skeleton, **more: Any) -> Any:
        return kind(model.named_parameters(), **{**settings, "skeleton": skeleton, **more})

    return make


MEMBERS: dict[str, Callable[..., Any]] = {
    "gsgd": maker(GSGD, lr=0.01),
    "momentum": maker(GSGD, lr=0.001, momentum=0.9),
    "nesterov": maker(GSGD, lr=0.001, momentum=0.9, nesterov=True),
    "dampening": maker(GSGD, lr=0.002, momentum=0.9, dampening=0.5),
    "decay": maker(GSGD, lr=0.01, weight_decay=0.1),
    "cap": maker(GSGD, lr=0.01, max_multiplier=0.5),
    "cap_decay_momentum": maker(GSGD, lr=0.01, momentum=0.5, weight_decay=0.1, max_multiplier=2.0),
    "tensor_lr": maker(GSGD, lr=torch.tensor(0.01), max_multiplier=2.0),
    "relative": maker(GSGD, lr=0.003, momentum=0.9, relative=True),
    "gadam": maker(GAdam, lr=0.003),
    "gadam_decay": maker(GAdam, lr=0.003, eps=1e-2, weight_decay=0.1),
    "gadam_cap": maker(GAdam, lr=0.003, max_multiplier=0.5, weight_decay=0.1),
    "gadam_relative": maker(GAdam, lr=0.003, relative=True),
}
"""G-SGD and G-Adam with every setting that changes a step."""


class Problem:
    """A small network with random inputs and targets, its graph's skeleton, and a
    loss to be differentiated.
    """

    def __init__(self, name: str | Case, rule: str = "modulo", unit: bool = False) -> None:
        model, args = TRAINED[name]() if isinstance(name, str) else name
        generator = torch.Generator().manual_seed(3)
        self.model = model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = 0.3 + 0.6 * torch.rand(
                    parameter.shape, generator=generator, dtype=parameter.dtype
                )
                positive = torch.rand(parameter.shape, generator=generator) < (
                    1.0 if parameter.ndim == 1 else 0.8
                )
                parameter.copy_(torch.where(positive, drawn, -drawn))
        self.args = tuple(
            torch.randn(a.shape, generator=generator, dtype=torch.float64) for a in args
        )
        self.target = torch.randn(model(*self.args).shape, generator=generator, dtype=torch.float64)
        self.rule = rule
        if unit:
            init_skeleton_(self.model, self.skeleton(self.model))

    def skeleton(self, model: nn.Module) -> ps.Skeleton:
        return ps.trace(model, *self.args, sizes="given").skeleton(self.rule, seed=6)

    def oracle(self) -> PathProblem:
        skeleton = self.skeleton(self.model)
        return path_problem(skeleton.graph, skeleton)

    def loss(self, model: nn.Module, parameters: dict[str, Tensor] | None = None) -> Tensor:
        own = dict(model.named_parameters()) if parameters is None else parameters
        return (torch.func.functional_call(model, own, self.args) - self.target).square().mean()

    def twins(self, count: int = 2, spread: float = 1.0) -> Iterator[nn.Module]:
        """Copies of the model moved along the symmetry; the first is not moved."""
        graph = ps.trace(self.model, *self.args, sizes="given")
        for seed in range(count):
            generator = torch.Generator().manual_seed(seed)
            phi = spread * torch.randn(graph.num_units, generator=generator, dtype=torch.float64)
            yield ps.rescale_(copy.deepcopy(self.model), graph, phi if seed else 0 * phi)

    def train(self, model: nn.Module, make: Maker, steps: int) -> list[float]:
        return descend(make(model), lambda: self.loss(model), steps)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        return descend(optimizer, lambda: self.loss(model))[0]


def largest_difference(one: nn.Module, other: nn.Module | dict[str, Tensor]) -> float:
    """Largest difference of parameters, relative to the largest entry of each tensor."""
    others = dict(other.named_parameters()) if isinstance(other, nn.Module) else other
    return max(
        float(
            (p.detach() - others[name].detach()).abs().max()
            / others[name].detach().abs().max().clamp(min=1e-30)
        )
        for name, p in one.named_parameters()
    )


problem = functools.lru_cache(maxsize=None)(Problem)
