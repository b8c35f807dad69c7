"""Answers of verify and of the upper bound where a norm has a mode of its own, gradients are
sparse, or tensors plain attributes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps


def own_mode(training: bool, norm: nn.Module) -> nn.Sequential:
    """A norm in the other mode than the model."""
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 2)).train(training)
    norm.train(not training)
    return model


def frozen_instance_norm() -> nn.Sequential:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv1d(3, 4, 1), norm, nn.ReLU(), nn.Conv1d(4, 2, 1))
    norm.eval()
    return model


# name -> a model, its inputs, and its units, if all of them are known
ANSWERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int | None]] = {
    "a frozen norm in a training model": (
        lambda: own_mode(True, nn.BatchNorm1d(4)), lambda: torch.randn(6, 3), 8,
    ),
    "a training norm in an evaluated model": (
        lambda: own_mode(False, nn.BatchNorm1d(4)), lambda: torch.randn(6, 3), 8,
    ),
    "a frozen instance norm": (frozen_instance_norm, lambda: torch.randn(6, 3, 5), 8),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.ReLU(), nn.Linear(4, 2)),
        lambda: torch.tensor([[0, 1, 2], [3, 4, 0]]), 4,
    ),
    "a plain tensor": (
        lambda: network(
            lambda net, x: net.b(torch.relu(net.a(x @ net.k))),
            a=nn.Linear(3, 4), b=nn.Linear(4, 2), k=torch.eye(3),
        ),
        lambda: torch.randn(5, 3), 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_hold_and_brackets_are_closed(name: str) -> None:
    make, inputs, units = ANSWERS[name]
    found = ps.verify(make(), inputs(), upper_bound=True)
    assert found.holds
    if units is not None:
        assert (found.units, found.units_at_most) == (units, units)


def test_a_bound_that_is_not_attempted_names_the_true_reason() -> None:
    layers = nn.GroupNorm(2, 4), nn.BatchNorm2d(4, affine=False), nn.LeakyReLU()
    found = ps.verify(nn.Sequential(*layers), torch.randn(3, 4, 5, 5), upper_bound=True)
    assert "detached" not in found.upper_bound["evidence"]


def test_a_model_that_ignores_its_input_is_called_so() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.LayerNorm(1))
    assert ps.verify(model, torch.randn(6, 3)).invariance["vacuous"]
