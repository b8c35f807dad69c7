"""How often a verification, and channels, run and copy the model, against a committed budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from zoo.entry import load

import pathspace as ps

# forwards of one `verify`, the capture included (18 and 20 today)
BUDGET = 60
# forwards of one `channels`: a capture, two draws, and their channels in another order
CHANNELS = 5
# forwards of one `remove`: a trial, the masked and the smaller model; its copies: one to test, and
# the result
REMOVAL, COPIES = 3, 2


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_residual_network_is_verified_within_its_budget(
    monkeypatch: pytest.MonkeyPatch, mode: str, batch: int
) -> None:
    model, _, _ = load()["resnet18"].make(mode)
    forward, count = nn.Conv2d.forward, 0

    def counted(layer: nn.Conv2d, x: Tensor) -> Tensor:
        nonlocal count
        # (the stem runs once in each)
        count += layer.in_channels == 3
        return forward(layer, x)

    monkeypatch.setattr(nn.Conv2d, "forward", counted)
    certificate = ps.verify(model, torch.randn(batch, 3, 64, 64))
    assert certificate.holds is not False
    assert 5 < count <= BUDGET, count


@pytest.mark.slow
def test_channels_are_found_and_removed_within_their_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, args, _ = load()["resnet18"].make("eval")
    forward, run, deepcopy = nn.Conv2d.forward, fx.Interpreter.run, copy.deepcopy
    counts = {"forwards": 0, "copies": 0}

    def convolved(layer: nn.Conv2d, x: Tensor) -> Tensor:
        # (the stem runs once in each)
        counts["forwards"] += layer.in_channels == 3
        return forward(layer, x)

    def interpreted(graph: fx.Interpreter, *values: Any, **options: Any) -> Any:
        counts["forwards"] += 1
        return run(graph, *values, **options)

    def copied(value: Any, *rest: Any) -> Any:
        counts["copies"] += isinstance(value, type(model)) and len(value) == len(model)
        return deepcopy(value, *rest)

    monkeypatch.setattr(nn.Conv2d, "forward", convolved)
    monkeypatch.setattr(fx.Interpreter, "run", interpreted)
    monkeypatch.setattr(copy, "deepcopy", copied)
    groups = ps.channels(model, *args)
    assert 0 < counts["forwards"] <= CHANNELS, counts
    counts.update(forwards=0, copies=0)
    groups.remove(keep=0.5)
    assert 1 < counts["forwards"] <= REMOVAL, counts
    assert 0 < counts["copies"] <= COPIES, counts
