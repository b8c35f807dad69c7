"""Answers of verify and of the upper bound where a norm has a mode of its own or few numbers,
gradients are sparse, tensors plain attributes, or outputs no numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import mlp, network
from slow_names import slow_names
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


def test_outputs_that_are_no_numbers_are_counted_and_have_to_stay() -> None:
    model = network(
        lambda net, x: net.rest(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
        rest=mlp(4, 3, 2),
    )
    x = torch.randn(7, 4)
    x[2] = 0
    found = ps.verify(model, x).invariance
    assert found["holds"]
    assert "2 of 14 outputs are NaN, and stay so" in found["evidence"]
    assert not found["vacuous"]
    nothing = ps.verify(model, 0 * x).invariance
    assert nothing["vacuous"]
    assert "14 of 14" in nothing["evidence"]


# features, a norm of one or two numbers each, shape of the inputs
OF_FEW: dict[str, tuple[int, nn.Module, tuple[int, ...]]] = {
    "groups of 2": (8, nn.GroupNorm(4, 8), (5, 3)),
    "layer of 2": (2, nn.LayerNorm(2), (5, 3)),
    "batch of 2": (4, nn.BatchNorm1d(4), (2, 3)),
    "instance of 2": (4, nn.InstanceNorm1d(4), (5, 3, 2)),
}


@pytest.mark.parametrize("norm_eps", ["ignore", "respect"])
@pytest.mark.parametrize("name", slow_names(OF_FEW, ["groups of 2", "instance of 2"]))
def test_a_gradient_that_vanishes_refutes_nothing(name: str, norm_eps: str) -> None:
    """Two numbers become 1 and -1, one becomes 0: what is left of the gradient is rounding."""
    width, norm, shape = OF_FEW[name]
    layer = (lambda i, o: nn.Conv1d(i, o, 1)) if len(shape) == 3 else nn.Linear
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(layer(3, width), norm, nn.ReLU(), layer(width, 2))
        certificate = ps.verify(model, 10**seed * torch.randn(shape), norm_eps=norm_eps)
        assert certificate.holds, certificate.invariance["evidence"]
