"""Adapters beside frozen layers: the gauge that is theirs alone, and rivals from the
formulas of their papers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from descent import descend
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import pathspace as ps
from pathspace.training import GAdam, GaugeFixed
from pathspace.training.experiments.adapters import LoRARite, lora_plus
from pathspace.training.optim.matching import movable

WIDTH, RANK = 6, 2


class Lora(nn.Module):
    """``W x + B A x``; ``merged`` multiplies the matrices first, as merged
    weights and their training do.
    """

    def __init__(self, merged: bool = False) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(WIDTH, WIDTH), merged
        self.a, self.b = (
            nn.Parameter(0.3 * torch.randn(RANK, WIDTH)),
            nn.Parameter(torch.zeros(WIDTH, RANK)),
        )
        self.trained = ["a", "b"]

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)
        return self.base(x) + x @ self.a.T @ self.b.T


class Dora(nn.Module):
    """``m (W + B A) / |W + B A|`` by rows, with a trained size ``m``."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = (
            nn.Parameter(0.3 * torch.randn(RANK, WIDTH)),
            nn.Parameter(torch.zeros(WIDTH, RANK)),
        )
        self.size = nn.Parameter(self.base.weight.detach().norm(dim=1, keepdim=True))
        self.trained = ["a", "b", "size"]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.b @ self.a
        return F.linear(x, self.size * weight / weight.norm(dim=1, keepdim=True), self.base.bias)


class Vera(nn.Module):
    """``W x + b * B (d * A x)`` with frozen random ``A`` and ``B``: two vectors are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(WIDTH, 4))
        self.inner, self.outer = (
            nn.Parameter(torch.full((4,), 0.1)),
            nn.Parameter(torch.zeros(WIDTH)),
        )
        self.trained = ["inner", "outer"]

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.outer * (((x @ self.a.T) * self.inner) @ self.b.T)


class Whole(nn.Module):
    """A frozen network whose middle layer has an adapter."""

    def __init__(self, adapter: nn.Module) -> None:
        super().__init__()
        self.first, self.adapted, self.last = nn.Linear(5, WIDTH), adapter, nn.Linear(WIDTH, 3)
        trained = {f"adapted.{name}" for name in adapter.trained}  # type: ignore[union-attr]
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.adapted(torch.relu(self.first(x)))))


# how many scales are the adapter's own; which of its tensors grow and which shrink with them
ADAPTERS: dict[str, tuple[Callable[[], nn.Module], int, tuple[str, str]]] = {
    "lora": (Lora, RANK, ("a", "b")),
    "lora, merged": (lambda: Lora(merged=True), RANK, ("a", "b")),
    "dora": (Dora, RANK, ("a", "b")),
    "vera": (Vera, 1, ("inner", "outer")),
}


def made(name: str) -> tuple[Whole, Tensor, Tensor]:
    torch.manual_seed(0)
    return Whole(ADAPTERS[name][0]()).double(), torch.randn(40, 5).double(), torch.arange(40) % 3


def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, steps: int) -> list[float]:
    return descend(optimizer, lambda: F.cross_entropy(model(x), y), steps)


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_gauge_of_the_adapter_alone(name: str) -> None:
    model, x, y = made(name)
    graph = ps.trace(model, x[:2])
    own, _ = movable(graph, {name for name, _ in trained(model)})
    _, scales, (grows, shrinks) = ADAPTERS[name]
    assert own.num_units == scales
    runs: dict[str, list[list[float]]] = {"gauge-fixed": [], "AdamW": []}
    for arm, losses in runs.items():
        for factor in (1.0, 50.0):
            one = copy.deepcopy(model)
            with torch.no_grad():
                one.adapted.get_parameter(grows).mul_(factor)
                one.adapted.get_parameter(shrinks).div_(factor)
            frozen = {key: p.clone() for key, p in one.named_parameters() if not p.requires_grad}
            optimizer: Optimizer = AdamW(trained(one), lr=1e-2)
            if arm == "gauge-fixed":
                optimizer = GaugeFixed(optimizer, graph, model=one)
            losses.append(train(one, optimizer, x, y, 40))
            assert all(torch.equal(p, one.get_parameter(key)) for key, p in frozen.items())
    np.testing.assert_allclose(*runs["gauge-fixed"], rtol=1e-9)
    assert runs["gauge-fixed"][0][-1] < runs["gauge-fixed"][0][0]
    assert abs(runs["AdamW"][0][-1] / runs["AdamW"][1][-1] - 1) > 1e-3


def test_steps_on_path_values_of_the_adapter_alone() -> None:
    """From weights that are not 0, since path values of 0 have no logarithm to step in.

    (Of VeRA every path value of the trained vectors would have a frozen matrix follow
    it; there they all stay.)
    """
    model, x, y = made("lora")
    _, _, (grows, shrinks) = ADAPTERS["lora"]
    with torch.no_grad():
        model.adapted.get_parameter(shrinks).uniform_(-0.5, 0.5)
    losses = []
    for factor in (1.0, 50.0):
        one = copy.deepcopy(model)
        with torch.no_grad():
            one.adapted.get_parameter(grows).mul_(factor)
            one.adapted.get_parameter(shrinks).div_(factor)
        skeleton = ps.trace(one, x[:2]).skeleton("magnitude")
        optimizer = GAdam(trained(one), lr=1e-3, skeleton=skeleton, max_multiplier=1.0)
        losses.append(train(one, optimizer, x, y, 20))
    np.testing.assert_allclose(*losses, rtol=1e-9)
    assert losses[0][-1] < losses[0][0]


# --- rivals


def test_lora_rite_does_not_see_how_the_product_is_split() -> None:
    model, x, y = made("lora")
    torch.manual_seed(1)
    change = torch.randn(RANK, RANK).double() + 2 * torch.eye(RANK).double()
    products, losses = [], []
    for mixed in (False, True):
        one = copy.deepcopy(model)
        a, b = one.adapted.a, one.adapted.b
        with torch.no_grad():
            b.copy_(torch.linspace(-1, 1, b.numel()).view(b.shape))
            if mixed:
                b.copy_(b @ change)
                a.copy_(torch.linalg.solve(change, a))
        losses.append(train(one, LoRARite([(b, a)], lr=0.02), x, y, 30))
        products.append((b @ a).detach())
    torch.testing.assert_close(products[0], products[1], rtol=1e-7, atol=1e-9)
    assert losses[0][-1] < losses[0][0]


def test_lora_rite_by_its_formulas() -> None:
    """The second step, with roots and inverses written out."""
    up, down = (nn.Parameter(torch.randn(*size).double()) for size in ((5, 2), (2, 4)))
    target = torch.randn(5, 4).double()
    optimizer = LoRARite([(up, down)], lr=0.05, betas=(0.8, 0.9))
    memory: dict[str, Tensor] = {}
    for turn in (1, 2):
        optimizer.zero_grad()
        (up @ down - target).square().sum().backward()
        basis, size = torch.linalg.qr(down.detach().T)
        g = up.grad @ size.inverse()
        if turn == 1:
            memory = {"V": 0.1 * g.T @ g, "basis": basis}
            first = 0.2 * g @ torch.linalg.inv(_root(g.T @ g))
        else:
            turning = basis.T @ memory["basis"]
            moved = turning @ memory["V"] @ turning.T
            lost = (
                (torch.linalg.eigvalsh(memory["V"]) - torch.linalg.eigvalsh(moved))
                .max()
                .clamp(min=0)
            )
            second = 0.9 * (moved + lost * torch.eye(2).double()) + 0.1 * g.T @ g
            first = 0.8 * memory["M"] @ turning.T + 0.2 * g @ torch.linalg.inv(
                _root(second / (1 - 0.9**2))
            )
        memory["M"] = first
        wanted = up.detach() - 0.05 * first / (1 - 0.8**turn) @ size.inverse().T
        optimizer.step()
        torch.testing.assert_close(up.detach(), wanted, rtol=1e-9, atol=1e-12)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ values.sqrt().diag() @ vectors.T


def test_both_train_from_zero_and_lora_plus_has_two_rates() -> None:
    for make in (lambda pair: LoRARite([pair], lr=0.05), lambda pair: lora_plus([pair], lr=1e-3)):
        model, x, y = made("lora")
        start = model.adapted.a.detach().clone()
        optimizer = make((model.adapted.b, model.adapted.a))
        losses = train(model, optimizer, x, y, 30)
        assert losses[-1] < losses[0] and not torch.equal(start, model.adapted.a)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 16e-3]
