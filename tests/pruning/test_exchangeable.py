"""Channels of one layout that the model treats differently cannot change places."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps
from pathspace.capture.capture import capture
from pathspace.pruning import exchangeable
from pathspace.pruning.equivariant import treats_channels_alike
from pathspace.pruning.matching import permuted


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(3, 6, 1), nn.Conv1d(6, 3, 1)
        self.register_buffer("held", torch.rand(6, 1))
        self.register_buffer("mask", torch.tensor([1, 1, 0, 1, 1, 0]).bool()[:, None])
        self.between, self.fixed = between, torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x), x))


def shifted_in_time(_: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, :2, :-1], out[:, 2:4, 1:], out[:, 4:] = h[:, :2, 1:], h[:, 2:4, :-1], h[:, 4:]
    return out


def partly_residual(_: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    out = h.tanh().clone()
    out[:, :2] += h[:, :2]
    return out


# what stands between two layers -> sizes of the groups of six channels
BETWEEN: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], Tensor], list[int]]] = {
    "the same for all": (lambda _, h, x: h.relu(), [6]),
    "two functions": (lambda _, h, x: torch.cat([h[:, :2].relu(), h[:, 2:].tanh()], 1), [2, 4]),
    "a part rolled": (lambda _, h, x: torch.cat([h[:, :3].roll(1, -1), h[:, 3:]], 1), [3, 3]),
    "shifts in time": (shifted_in_time, [2, 2, 2]),
    "a part of a residual": (partly_residual, [2, 4]),
    "a constant": (lambda model, h, x: h.relu() * model.fixed, []),
    "a mask": (lambda model, h, x: torch.where(model.mask, h, h.relu()), [4, 2]),
    "a buffer": (lambda model, h, x: h.relu() * model.held, [6]),
    "a buffer that an input meets": (
        lambda model, h, x: (
            h.relu() * model.held + (x[:, :1] * model.held * model.fixed).sum(1, keepdim=True)
        ),
        [],
    ),
    "a filter": (
        lambda model, h, x: nn.functional.conv1d(h, model.fixed[:, None], groups=6),
        [],
    ),
}


def expect_sizes(model: nn.Module, x: Tensor, sizes: list[int]) -> None:
    """Two channels of a group can be exchanged, and two of different groups cannot."""
    groups = ps.channels(model, x)
    assert sorted(map(len, groups)) == sorted(sizes)
    y = model(x)
    for group in groups:
        order = torch.arange(len(group)).roll(1)
        moved = groups.permute({group.name: order})
        assert torch.allclose(moved(x), y, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", BETWEEN)
def test_channels_that_are_treated_differently_are_told_apart(name: str) -> None:
    between, sizes = BETWEEN[name]
    expect_sizes(Between(between).double(), torch.randn(2, 3, 5).double(), sizes)


def test_groups_of_a_convolution_that_read_inputs_have_an_order() -> None:
    model = nn.Sequential(nn.Conv1d(2, 6, 3, groups=2), nn.ReLU(), nn.Conv1d(6, 3, 1)).double()
    expect_sizes(model, torch.randn(2, 2, 7).double(), [3, 3])


class Biased(nn.Module):
    """Attention with another slope of the distance for each head."""

    def __init__(self, slopes: list[float]) -> None:
        super().__init__()
        self.qkv, self.out, self.slopes = nn.Linear(4, 12), nn.Linear(4, 2), slopes

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        q, k, v = self.qkv(x).view(count, length, 3, 2, 2).permute(2, 0, 3, 1, 4)
        far = torch.tensor(self.slopes).view(2, 1, 1).to(x) * torch.arange(length).to(x)
        mixed = (q @ k.mT + far).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(count, length, 4))


@pytest.mark.parametrize(("slopes", "sizes"), [([1.0, 0.5], []), ([0.5, 0.5], [2])])
def test_heads_with_slopes_of_their_own_have_an_order(
    slopes: list[float], sizes: list[int]
) -> None:
    expect_sizes(Biased(slopes).double(), torch.randn(2, 5, 4).double(), sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two functions", "a constant", "shifts in time"])
def test_an_order_that_is_another_function_is_not_the_same(name: str) -> None:
    model, x = Between(BETWEEN[name][0]).double(), torch.randn(2, 3, 5).double()
    places = {("first.weight", 0), ("first.bias", 0), ("last.weight", 1)}
    slices = {"all": {side: torch.arange(6)[:, None] for side in places}}
    graph = ps.trace(model, x)
    for one, two in itertools.combinations(range(6), 2):
        order = torch.arange(6)
        order[[one, two]] = order[[two, one]]
        other = permuted(model, slices, {"all": order})
        same = torch.allclose(other(x), model(x), atol=1e-10)
        assert ps.compare(model, other, graph).same == same


def parts() -> dict[str, nn.Module]:
    """Layers for :data:`ALIKE`, some of which each of its functions uses."""
    return {
        "first": nn.Conv2d(4, 6, 3, padding=1),
        "norm": nn.BatchNorm2d(6),
        "own": nn.Conv2d(6, 6, 3, padding=1, groups=6),
        "gate": nn.Conv2d(6, 6, 1),
        "next": nn.Conv2d(6, 4, 1),
        "halves": nn.Conv2d(4, 6, 1, groups=2),
        "given": nn.BatchNorm2d(4),
        "place": nn.Conv2d(4, 1, 1),
    }


def residual(m: nn.Module, x: Tensor) -> Tensor:
    h = m.norm(m.first(x)).relu()
    h = h + m.own(h) * m.gate(h.mean((2, 3), keepdim=True)).sigmoid()
    return m.next(nn.functional.max_pool2d(h, 2))


def mapped_input(m: nn.Module, x: Tensor) -> Tensor:
    return m.halves(m.place(x).sigmoid() * x + m.next(m.first(x)))


# what a model does -> whether each operation treats all channels alike, whatever the weights
ALIKE: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], bool]] = {
    "norm, gate and sum": (residual, True),
    "an image and its sum with a layer": (lambda m, x: m.first(x + m.next(m.first(x))), False),
    "a norm of inputs": (lambda m, x: m.first(m.given(x)), False),
    "inputs times a map": (mapped_input, False),
    "another order": (lambda m, x: m.next(m.first(x).flip(1)), False),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_needs_no_measurement_is_measured_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use, alike = ALIKE[name]
    model = network(use, **parts()).eval()
    captured = capture(model, (torch.randn(2, 4, 4, 4),))
    assert treats_channels_alike(captured) == alike
    found = exchangeable.channel_groups(captured, model)
    monkeypatch.setattr(exchangeable, "treats_channels_alike", lambda _: False)
    measured = exchangeable.channel_groups(captured, model)
    assert found[1] == measured[1]
    assert [(g.name, len(g), g.readers) for g in found[0]] == [
        (g.name, len(g), g.readers) for g in measured[0]
    ]
