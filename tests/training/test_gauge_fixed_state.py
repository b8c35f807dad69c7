"""States, copies and conversions of optimizers in the canonical gauge."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gauged import OPTIMIZERS, made, mlp, resnet, scrambled, train
from slow_names import slow_names
from torch import nn

import pathspace as ps
from pathspace.training import GaugeFixed


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_runs_go_on_bitwise_from_a_state(kind: str) -> None:
    model, x, y = made(mlp)
    optimizer = GaugeFixed(OPTIMIZERS[kind](model), ps.trace(model, x[:2]))
    train(model, optimizer, x, y, 7)
    kept = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    kept.seek(0)
    saved = torch.load(kept)
    other, _, _ = made(mlp, seed=1)
    fresh = GaugeFixed(OPTIMIZERS[kind](other), ps.trace(other, x[:2]))
    fresh.load_state_dict(saved["optimizer"])
    other.load_state_dict(saved["model"])
    assert np.array_equal(train(model, optimizer, x, y, 9), train(other, fresh, x, y, 9))
    assert torch.equal(optimizer.phi, fresh.phi)
    with pytest.raises(ps.PathspaceError, match="without the gauge"):
        fresh.load_state_dict(torch.optim.SGD(other.parameters()).state_dict())


def test_copies_and_pickles() -> None:
    model, x, y = made(mlp)
    optimizer = GaugeFixed(torch.optim.AdamW(model.parameters(), lr=1e-2), ps.trace(model, x[:2]))
    # a scheduler puts a step of its own in the place of the optimizer's, bound to this optimizer
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    train(model, optimizer, x, y, 3)
    twins = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    wanted = train(model, optimizer, x, y, 5)
    for other, again in twins:
        assert np.array_equal(wanted, train(other, again, x, y, 5))


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


def test_fabric_wraps_it_like_any_optimizer() -> None:
    from lightning.fabric import Fabric

    model, x, y = made(mlp)
    graph, losses = ps.trace(model, x[:2]), []
    for wrapped in (False, True):
        one = copy.deepcopy(model)
        optimizer: Any = GaugeFixed(torch.optim.AdamW(one.parameters(), lr=1e-2), graph, model=one)
        if wrapped:
            one, optimizer = Fabric(accelerator="cpu", devices=1).setup(one, optimizer)
        losses.append(train(one, optimizer, x, y, 5))
    assert np.array_equal(*losses)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    "order", slow_names(["first", "after it was made", "last"], ["after it was made"])
)
def test_weights_are_loaded_at_any_time(kind: str, order: str) -> None:
    """Trainers load the weights before they make the optimizer, which then rescales them."""
    model, x, y = made(resnet)
    optimizer = GaugeFixed(OPTIMIZERS[kind](model), ps.trace(model, x[:2]))
    train(model, optimizer, x, y, 7)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, _, _ = made(resnet, seed=1)
    if order == "first":
        other.load_state_dict(weights)
    fresh = GaugeFixed(OPTIMIZERS[kind](other), ps.trace(other, x[:2]))
    # as wrappers do that move states to a device
    fresh.load_state_dict(fresh.state_dict())
    if order == "after it was made":
        other.load_state_dict(weights)
    fresh.load_state_dict(state)
    if order == "last":
        other.load_state_dict(weights)
    assert np.array_equal(train(model, optimizer, x, y, 9), train(other, fresh, x, y, 9))
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(m.state_dict().values() for m in (model, other)), strict=True)
    )
    # what was kept for this is given up
    assert not fresh.__dict__["_given"]


@pytest.mark.parametrize("order", ["first", "after it was made", "last"])
@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.0, 1e-2)])
def test_a_run_goes_on_from_weights_that_training_has_not_moved(
    order: str, rates: tuple[float, ...]
) -> None:
    """A script makes the same weights at each start; rates that begin at 0 leave them in
    the canonical gauge of the start.
    """

    def start() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        )
        return model, torch.randn(40, 4), torch.arange(40) % 3

    def wrapped(model: nn.Module, x: torch.Tensor) -> GaugeFixed:
        return GaugeFixed(torch.optim.AdamW(model.parameters(), lr=rates[0]), ps.trace(model, x))

    model, x, y = start()
    optimizer = wrapped(model, x)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        train(model, optimizer, x, y, 1)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, _, _ = start()
    if order == "first":
        other.load_state_dict(weights)
    fresh = wrapped(other, x)
    if order == "after it was made":
        other.load_state_dict(weights)
    fresh.load_state_dict(state)
    if order == "last":
        other.load_state_dict(weights)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in weights.items())
    assert np.array_equal(train(model, optimizer, x, y, 5), train(other, fresh, x, y, 5))


def test_a_model_in_another_type_keeps_its_running_statistics() -> None:
    """``model.double()`` puts other tensors in the place of buffers."""
    ends = []
    for late in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16, momentum=0.02), nn.ReLU(), nn.Linear(16, 3)
        )
        x, y = torch.randn(40, 6), torch.arange(40) % 3
        if not late:
            model.double()
        # (traced as it is; all weights are exact in float32)
        optimizer = GaugeFixed(
            torch.optim.AdamW(model.parameters(), 0.05), ps.trace(model, x.to(model[0].weight))
        )
        train(model.double(), optimizer, x.double(), y, 15)
        ends.append(model.eval()(x.double()).detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


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


def test_a_state_before_the_first_step_has_no_gauge() -> None:
    """Adagrad's first sums are constants, whatever the scales of the weights."""
    model, x, y = made(mlp)
    graph, ends = ps.trace(model, x[:2]), []
    for one in (copy.deepcopy(model), scrambled(model, graph, 10)):
        inner = torch.optim.Adagrad(one.parameters(), 0.02, initial_accumulator_value=0.1)
        ends.append(train(one, GaugeFixed(inner, graph, model=one), x, y, 8))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-9)
