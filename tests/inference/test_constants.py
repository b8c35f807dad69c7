"""Constants have a scale, however large or small: only zeros and infinities have none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Between, network
from rescaled import change
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps

pytestmark = pytest.mark.usefixtures("no_rule_fails")

INF, EVERY_SECOND = math.inf, torch.tensor([True, False] * 3)
LAST = torch.finfo(torch.float64).max


def largest_change(model: nn.Module, graph: ps.ReductionGraph, x: Tensor) -> float:
    """How far the outputs move under mild and wild rescalings at many input sizes."""
    sizes = (0.01 * x, x, 100.0 * x)
    return max(change(model, graph, *sizes, spread=spread) for spread in (1.0, 8.0))


def with_constant(h: Tensor, value: float) -> Tensor:
    return torch.cat([h, torch.full_like(h[:, :1], value)], -1)


def first_set_to(h: Tensor, value: float) -> Tensor:
    out = h.clone()
    out[:, 0] = value
    return out


# operation, features it leaves, free units
CONSTANTS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "threshold far below": (lambda h: F.threshold(h, 0, -1e5), 6, 0),
    "threshold at zero": (lambda h: F.threshold(h, 0, 0.0), 6, 6),
    "threshold to infinity": (lambda h: 1 / F.threshold(h, 0.0, INF), 6, 6),
    "wide hardtanh": (lambda h: F.hardtanh(h, 0, 4e4), 6, 0),
    "clamp_max far above": (lambda h: torch.clamp_max(h, 1e20), 6, 0),
    "clamp at the last number": (lambda h: h.clamp(-LAST, LAST), 6, 6),
    "clamp at infinity": (lambda h: h.clamp(0, INF), 6, 6),
    "clamp at a tensor": (lambda h: torch.clamp(h, h.new_zeros(()), h.new_full((), 3.0)), 6, 0),
    "maximum with a constant": (lambda h: torch.maximum(h, h.new_full(h.shape, 0.1)), 6, 0),
    "tiny addition": (lambda h: h + 1e-30, 6, 0),
    "quotient of a constant": (lambda h: 2.5 / h, 6, 6),
    "quotient of a constant, added": (lambda h: 1 / h + h, 6, 0),
    "larger than a half": (lambda h: h * (h > 0.5), 6, 0),
    "close to another": (lambda h: h * h.isclose(h.flip(-1), atol=1.0), 6, 0),
    "close in proportion": (lambda h: h * h.isclose(h.flip(-1), rtol=0.5, atol=0.0), 6, 3),
    "alpha dropout": (lambda h: F.alpha_dropout(h, 0.5, True), 6, 0),
    "alpha dropout that does not drop": (lambda h: F.alpha_dropout(h, 0.5, False), 6, 6),
    "constant padding under a maximum": (
        lambda h: F.max_pool1d(F.pad(F.relu(h), (1, 1), value=1.0).unsqueeze(1), 2).squeeze(1), 4,
        2),
    "mask of -1e9 under a maximum": (lambda h: h.masked_fill(EVERY_SECOND, -1e9).amax(-1, keepdim=True), 1, 0),  # noqa: E501
    "infinite mask under a maximum": (lambda h: h.masked_fill(EVERY_SECOND, -INF).amax(-1, keepdim=True), 1, 1),  # noqa: E501
    "mask of -1e4 under a softmax": (lambda h: h.masked_fill(EVERY_SECOND, -1e4).softmax(-1) * h, 6,
                                     3),
    "choice of a constant": (lambda h: torch.where(h > 0, h, -1e9), 6, 0),
    "choice of a place": (lambda h: torch.where(EVERY_SECOND, h, 1.0), 6, 3),
    "a column of ones": (lambda h: with_constant(h, 1.0), 7, 6),
    "a column of ones, measured": (lambda h: with_constant(h, 1.0).norm(dim=-1, keepdim=True), 1,
                                   0),
    "written over": (lambda h: first_set_to(h, 1.0), 6, 5),
    "scattered constants": (lambda h: h.scatter(1, h.argmax(-1, keepdim=True), 1.0), 6, 0),
    "filled slices": (lambda h: h.index_fill(1, torch.tensor([0, 2]), 1.0), 6, 4),
    "infinities of a mask replaced": (
        lambda h: h.masked_fill(h > 0, -math.inf).nan_to_num() * 1e-307,
        6,
        0,
    ),
    "infinities replaced": (lambda h: (1 / F.relu(h)).nan_to_num() * 1e-307, 6, 0),
    "angles to axes": (lambda h: F.cosine_similarity(h.unsqueeze(1), torch.eye(6).to(h), dim=-1), 6,
                       1),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_costs_the_units_it_meets(name: str) -> None:
    operation, features, units = CONSTANTS[name]
    model, x = Between(operation, features).double(), torch.randn(48, 4).double()
    graph = ps.trace(model, x)
    assert graph.num_units == units
    if units:
        assert largest_change(model, graph, x) < 1e-8


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("fill", [-INF, -LAST, -1e9, -1e4, -100.0])
def test_masks_under_a_softmax_cost_nothing(fill: float, added: bool) -> None:
    """Masked attention written out: scores where the mask is false become ``fill``."""

    def forward(net: Any, x: Tensor) -> Tensor:
        scores = net.query(x) @ net.key(x).transpose(-1, -2)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if added:
            scores = scores + torch.zeros_like(scores[0]).masked_fill(hidden, fill)
        else:
            scores = scores.masked_fill(hidden, fill)
        return net.out(scores.softmax(-1) @ net.value(x))

    layers = {name: nn.Linear(4, 4) for name in ("query", "key", "value", "out")}
    model, x = network(forward, **layers).double(), torch.randn(2, 5, 4).double()
    graph = ps.trace(model, x)
    # four features of queries against those of keys, four of values
    assert graph.num_units == 8
    assert largest_change(model, graph, x) < 1e-8
