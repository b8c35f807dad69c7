"""States, copies and conversions of optimizers in the canonical gauge."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gauged import OPTIMIZERS, made, mlp, resnet, scrambled, train
from torch import nn

import pathspace as ps
from pathspace.training import GaugeFixed


def test_gradients_from_before_the_wrapper_belong_to_its_weights() -> None:
    """A backward pass, then the wrapper, then a step: rescaled copies take the same step."""
    model, x, y = made(mlp)
    ends = []
    for one in (model, scrambled(model, ps.trace(model, x[:2]))):
        torch.nn.functional.cross_entropy(one(x), y).backward()
        optimizer = GaugeFixed(torch.optim.SGD(one.parameters(), lr=0.1), ps.trace(one, x[:2]))
        optimizer.step()
        ends.append(one(x).detach())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


def test_an_optimizer_that_has_run_already_is_taken_over() -> None:
    model, x, y = made(mlp)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, inner, x, y, 5)
    before = {p: state["exp_avg"].clone() * p.detach() for p, state in inner.state.items()}
    GaugeFixed(inner, ps.trace(model, x[:2]))
    for p, state in inner.state.items():
        torch.testing.assert_close(state["exp_avg"] * p.detach(), before[p])


def test_copies_of_the_traced_model_and_wrappers() -> None:
    model, x, y = made(resnet)
    graph = ps.trace(model, x[:2])
    twin = copy.deepcopy(model)
    with pytest.raises(ps.PathspaceError, match="as model="):
        GaugeFixed(torch.optim.SGD(twin.parameters()), graph)
    wrapped = torch.compile(nn.DataParallel(twin), backend="eager")
    losses = [
        train(one, GaugeFixed(torch.optim.AdamW(one.parameters()), graph, model=whole), x, y, 3)
        for one, whole in ((twin, wrapped), (model, None))
    ]
    assert np.array_equal(*losses)


@pytest.mark.parametrize("where", ["canonical", "user"])
@pytest.mark.parametrize("by", ["unwrap", "optimizers"])
def test_what_was_wrapped_is_wrapped_again(where: str, by: str) -> None:
    """In the user's gauge, moments have another gauge between steps than the weights."""
    model, x, y = made(mlp)
    graph, ends = ps.trace(model, x[:2]), []
    for one in (copy.deepcopy(model), scrambled(model, graph, 10)):
        optimizer = GaugeFixed(OPTIMIZERS["adam"](one), graph, model=one, return_to=where)
        train(one, optimizer, x, y, 6)
        for p in one[0].parameters():
            p.requires_grad_(False)
        with pytest.raises(
            ps.PathspaceError, match=r"go on with GaugeFixed\(gauge_fixed.unwrap\(\), graph\)"
        ):
            train(one, optimizer, x, y, 1)
        for p in one[0].parameters():
            p.requires_grad_(True)
        inner = [optimizer.unwrap()] if by == "unwrap" else optimizer.optimizers
        # (the second time there is nothing to do)
        again = GaugeFixed(list(inner), graph, model=one, return_to=where)
        ends.append(train(one, again, x, y, 6))
        before = [state["exp_avg"].clone() for state in again.state.values()]
        optimizer.unwrap()
        assert all(
            torch.equal(a, state["exp_avg"])
            for a, state in zip(before, again.state.values(), strict=True)
        )
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-9)


Start = Callable[[int], tuple[nn.Module, torch.Tensor, torch.Tensor]]


def resting(seed: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A script makes the same weights at each start."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    return nn.Sequential(*layers), torch.randn(40, 4), torch.arange(40) % 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("start", "kind", "rates"),
    [
        (lambda seed: made(resnet, seed), "adamw", [None] * 7),
        pytest.param(lambda seed: made(resnet, seed), "muon", [None] * 7, marks=pytest.mark.slow),
        # rates that begin at 0 leave weights in the canonical gauge of the start
        (resting, "adamw", [0.0, 0.0]),
        (resting, "adamw", [0.0, 1e-2]),
    ],
)
@pytest.mark.parametrize("order", ["first", "after it was made", "last"])
def test_weights_are_loaded_at_any_time(
    start: Start, kind: str, rates: list[float | None], order: str
) -> None:
    """Trainers load the weights before they make the optimizer, which then rescales them."""
    model, x, y = start(0)
    optimizer = GaugeFixed(OPTIMIZERS[kind](model), ps.trace(model, x[:2]))
    for rate in rates:
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate
        train(model, optimizer, x, y, 1)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, _, _ = start(1)
    if order == "first":
        other.load_state_dict(weights)
    fresh = GaugeFixed(OPTIMIZERS[kind](other), ps.trace(other, x[:2]))
    if order == "after it was made":
        other.load_state_dict(weights)
    if start is not resting:
        # as wrappers do that move states to a device
        fresh.load_state_dict(fresh.state_dict())
    fresh.load_state_dict(state)
    if order == "last":
        other.load_state_dict(weights)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in weights.items())
    assert np.array_equal(train(model, optimizer, x, y, 9), train(other, fresh, x, y, 9))
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert torch.equal(optimizer.phi, fresh.phi)


@pytest.mark.parametrize("copied", [False, True])
def test_a_model_in_another_type_keeps_its_running_statistics(copied: bool) -> None:
    """``model.double()`` puts other tensors in the place of buffers."""
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16, momentum=0.02), nn.ReLU(), nn.Linear(16, 3)
    start, x, y = nn.Sequential(*layers), torch.randn(40, 6), torch.arange(40) % 3
    ends = []
    for late in (False, True):
        model = copy.deepcopy(start)
        if not late:
            model.double()
        # (traced as it is; all weights are exact in float32)
        graph = ps.trace(model, x.to(model[0].weight))
        pair: Any = model, GaugeFixed(torch.optim.AdamW(model.parameters(), 0.05), graph)
        pair = pickle.loads(pickle.dumps(pair)) if copied else pair
        model, optimizer = pair
        train(model.double(), optimizer, x.double(), y, 15)
        ends.append(model.eval()(x.double()).detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
