"""Wrong arguments of optimizers, and states that are none, end in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace import InputError
from pathspace.training import GSGD, GaugeFixed, PathSGD
from pathspace.training.optim.joined import Joined

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (model(X) - 1).square().mean().backward()
    optimizer.step()


def gauge_fixed(model: nn.Module) -> GaugeFixed:
    return GaugeFixed(torch.optim.AdamW(model.parameters(), lr=0.01), ps.trace(model, X))


def joined(model: nn.Module) -> Joined:
    weights, biases = ([p for p in model.parameters() if p.dim() == dims] for dims in (2, 1))
    return Joined([torch.optim.Muon(weights, lr=0.1), torch.optim.AdamW(biases, lr=0.01)])


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "gauge-fixed": gauge_fixed,
    "joined": joined,
    "path-sgd": lambda model: PathSGD(model.parameters(), 0.01, model=model, example=(X,)),
}
NO_STATES = (None, [], "state", {}, {"state": {}}, {"param_groups": []}, {"state": None})


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_is_no_state_is_refused_and_nothing_changes(kind: str) -> None:
    model = mlp()
    optimizer = WRAPPERS[kind](model)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    for bad in NO_STATES:
        with pytest.raises(InputError, match=f"{type(optimizer).__name__} found a"):
            optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert str(after) == str(before)


@pytest.mark.parametrize("key", ["phi", "turns", "kinds", "targets", "norms", "return_to"])
def test_a_gauge_with_a_missing_or_damaged_part_is_refused(key: str) -> None:
    model = mlp()
    optimizer = gauge_fixed(model)
    step(model, optimizer)
    good = optimizer.state_dict()
    gauge = good["gauge"]
    without = {name: value for name, value in gauge.items() if name != key}
    for bad in (without, {**gauge, key: None}, {**gauge, key: [1.0]}):
        with pytest.raises(InputError, match="GaugeFixed found a state"):
            optimizer.load_state_dict({**good, "gauge": bad})
    optimizer.load_state_dict(good)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "1", None, True, torch.ones(2)])
def test_a_bound_of_the_norm_is_a_number_of_at_least_0(bad: object) -> None:
    model = mlp()
    skeleton = ps.trace(model, X).skeleton()
    optimizer = GSGD(model.named_parameters(), lr=1e-3, skeleton=skeleton)
    model(X).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises((InputError, ps.InputTypeError), match="norm_ found max_norm="):
        optimizer.clip_path_grad_norm_(bad)  # type: ignore[arg-type]
    kept = [p.grad for p in model.parameters()]
    for one, other in zip(kept, before, strict=True):
        assert isinstance(one, Tensor) and torch.equal(one, other)
    # (measures the norm)
    assert optimizer.clip_path_grad_norm_(float("inf")) > 0


def test_a_model_is_a_module_and_a_gauge_is_fixed_once() -> None:
    model = mlp()
    graph, plain = ps.trace(model, X), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ps.InputTypeError, match="a str as its model"):
        GaugeFixed(plain, graph, model="x")  # type: ignore[arg-type]
    with pytest.raises(ps.InputTypeError, match=r"GaugeFixed as its optimizer.*unwrap"):
        GaugeFixed(GaugeFixed(plain, graph), graph)
