"""What the tests of optimizers share: cases in float64 with a loss, copies moved
along the symmetry, training.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import torch
from descent import descend
from oracles.alignment import path_problem
from oracles.gsgd import PathProblem
from torch import Tensor, nn
from training_cases import TRAINED

import pathspace as ps

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
Maker = Callable[[nn.Module], torch.optim.Optimizer]


class Problem:
    """A small network with random inputs and targets, its graph's skeleton, and a
    loss to be differentiated.
    """

    def __init__(self, name: str, rule: str = "modulo", unit: bool = False) -> None:
        model, args = TRAINED[name]()
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
            from pathspace.training import init_skeleton_

            init_skeleton_(self.model, self.skeleton(self.model))

    def to(self, place: str) -> Problem:
        """The same on another device."""
        self.model.to(place)
        self.args, self.target = tuple(a.to(place) for a in self.args), self.target.to(place)
        return self

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
