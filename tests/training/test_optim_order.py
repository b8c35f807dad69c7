"""States of parameters in another order, and in other groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from descent import descend
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import pathspace as ps
from pathspace.errors import InputError
from pathspace.training import GSGD, GAdam, GaugeFixed, PathSGD, init_skeleton_

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(16) % 3
Named = list[tuple[str, nn.Parameter]]


def net() -> nn.Sequential:
    """Its two inner layers have the same shapes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = [nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)]
        model = nn.Sequential(*sizes, nn.ReLU(), nn.Linear(5, 3)).double()
    init_skeleton_(model, ps.trace(model, X).skeleton())
    return model


def adamw(params: Any, model: nn.Module) -> GaugeFixed:
    return GaugeFixed(torch.optim.AdamW(params, lr=0.01), ps.trace(model, X), model=model)


MAKERS: dict[str, Callable[[Any, nn.Module], Optimizer]] = {
    "GSGD": lambda p, m: GSGD(p, lr=0.01, momentum=0.9, skeleton=ps.trace(m, X).skeleton()),
    "GAdam": lambda p, m: GAdam(p, lr=0.01, skeleton=ps.trace(m, X).skeleton()),
    "PathSGD": lambda p, m: PathSGD(p, lr=0.01, model=m, example=(X[:1],), every=10),
    "GaugeFixed": adamw,
}


def swapped(named: Named) -> Named:
    """The two layers of equal shapes change places."""
    return [named[i] for i in (0, 1, 4, 5, 2, 3, 6, 7)]


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> list[torch.Tensor]:
    descend(optimizer, lambda: F.cross_entropy(model(X), Y), steps)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_in_another_order_is_refused(kind: str) -> None:
    """It would give the moments of one layer to another one of the same shape."""
    model, twin = net(), net()
    optimizer = MAKERS[kind](list(model.named_parameters()), model)
    train(model, optimizer)
    state = optimizer.state_dict()
    other = MAKERS[kind](swapped(list(twin.named_parameters())), twin)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(InputError, match=r"parameter '2.weight' in place of '4.weight', expected"):
        other.load_state_dict(state)
    assert str(other.state_dict()) == str(before)
    right = MAKERS[kind](list(twin.named_parameters()), twin)
    right.load_state_dict(copy.deepcopy(state))
    twin.load_state_dict(model.state_dict())
    for mine, theirs in zip(train(model, optimizer), train(twin, right), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", MAKERS)
def test_groups_of_other_sizes_and_in_another_order_are_refused(kind: str) -> None:
    model, twin = net(), net()
    named, mine = list(model.named_parameters()), list(twin.named_parameters())
    optimizer = MAKERS[kind]([{"params": named[:6]}, {"params": named[6:]}], model)
    train(model, optimizer)
    for groups, words in (
        ([mine[6:], mine[:6]], "parameter '0.weight' in place of '6.weight'"),
        ([mine[:4], mine[4:]], r"groups of \[6, 2\] parameters, expected \[4, 4\]"),
    ):
        other = MAKERS[kind]([{"params": group} for group in groups], twin)
        with pytest.raises(InputError, match=words):
            other.load_state_dict(optimizer.state_dict())


def test_wrappers_and_other_names_keep_the_order() -> None:
    model, twin = net(), net()
    optimizer = MAKERS["GAdam"](list(model.named_parameters()), model)
    train(model, optimizer)
    compiled = [(f"_orig_mod.{name}", p) for name, p in twin.named_parameters()]
    other = MAKERS["GAdam"](compiled, twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    for mine, theirs in zip(train(model, optimizer), train(twin, other), strict=True):
        assert torch.equal(mine, theirs)


def test_tensors_of_other_shapes_are_refused_without_names() -> None:
    model, twin = net(), net()
    optimizer, other = adamw(model.parameters(), model), adamw(list(twin.parameters())[::-1], twin)
    train(model, optimizer)
    with pytest.raises(
        InputError, match=r"GaugeFixed found a state with 'exp_avg' of shape \(5, 4"
    ):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", ["Adam", "Adagrad"])
def test_path_sgd_refuses_the_state_of_another_optimizer(kind: str) -> None:
    model = net()
    foreign = getattr(torch.optim, kind)(model.parameters())
    train(model, foreign)
    with pytest.raises(
        InputError, match=r"PathSGD found a state with '.*', expected 'kappa' and 'step'"
    ):
        MAKERS["PathSGD"](model.named_parameters(), model).load_state_dict(foreign.state_dict())
