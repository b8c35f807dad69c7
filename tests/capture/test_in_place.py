"""What is written into memory with several names is seen under all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import pytest
import torch
from cases import network
from rescaled import change, traced
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps

# two layers of 3 inputs and 4 units, and an operation between them
Written = partial(cases.Between, features=4, inputs=3, units=4)


def divided_slice(h: Tensor) -> Tensor:
    h = h.abs()
    h[:, :2].div_(h[:, 2:])
    return h


def divided_behind_a_transpose(h: Tensor) -> Tensor:
    h = h.abs()
    other, view = h.clone(), h.t()
    h /= other.flip(-1)
    return view.t()


def root_of_a_slice(h: Tensor) -> Tensor:
    h = h.abs()
    part = h.view(-1, 2, 2)
    part[:, 0].sqrt_()
    return h.square()


def added_into_zeros(h: Tensor) -> Tensor:
    sums = torch.zeros(h.shape[0], 4, dtype=h.dtype)
    sums[:, :2].add_(F.relu(h[:, 2:]))
    return sums + F.relu(h)


def saturated_slice(h: Tensor) -> Tensor:
    h = h + 0
    h[:, :2].tanh_()
    return h


def multiplied_without_gradient(h: Tensor) -> Tensor:
    h = h.abs()
    with torch.no_grad():
        h[:, :2].mul_(h[:, 2:])
    return h


def assigned_without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        result = torch.zeros_like(h)
        result[:, :2] = F.relu(h)[:, :2]
        result[:, 2:] = F.relu(h)[:, 2:]
    return result


def only_name(h: Tensor) -> Tensor:
    return F.relu(h).mul_(2.0).neg_().clamp_(max=0.0)


# how many scales stay free
UNITS = {
    divided_slice: 4, divided_behind_a_transpose: 4, root_of_a_slice: 4, added_into_zeros: 2,
    saturated_slice: 2,
    multiplied_without_gradient: 4, assigned_without_gradient: 4,
    only_name: 4,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("function", UNITS, ids=lambda function: function.__name__)
def test_what_is_written_is_seen_under_every_name(function: Callable[[Tensor], Tensor]) -> None:
    traced(Written(function).double(), torch.randn(5, 3).double(), units=UNITS[function])


def test_a_mean_that_is_not_filled_yet_is_no_mask() -> None:
    model, x = Written(lambda h: F.relu(h) - model.center).double(), torch.randn(5, 3).double()
    model.register_buffer("center", torch.zeros(1, 4).double())
    assert ps.trace(model, x).num_units == 0


def test_parameters_in_the_same_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight.data = model[0].weight.data
    with pytest.raises(
        ps.InputError, match=r"'0.weight' and '2.weight' in the same memory; make them one"
    ):
        ps.trace(model, torch.randn(2, 4))
    model[2].weight = model[0].weight
    assert ps.trace(model, torch.randn(2, 4)).num_weights == 16 + 8


@pytest.mark.parametrize("factor", [1, 0.5])
def test_weights_that_are_multiplied_in_place_keep_their_scales(factor: float) -> None:
    """As language models do before they compute in half precision."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            net.b.weight.mul_(factor)
        return net.b(net.a(x).relu())

    x = torch.randn(5, 3).double()
    model = cases.network(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    certificate = ps.verify(copy.deepcopy(model), x, upper_bound=True)
    assert certificate.holds and certificate.units == certificate.units_at_most == 4
    assert change(model, ps.trace(model, x), x, x) < 1e-12


# --- numbers of parameters and statistics that code also reads in another way


def holding(read: Callable[[Any, Tensor], Tensor], hold: str) -> Any:
    """Two linear maps around a batch norm, and tensors that are held beside them."""
    model = network(
        lambda net, x: read(net, net.last(torch.relu(net.norm(net.first(x))))),
        first=nn.Linear(3, 4),
        norm=nn.BatchNorm1d(4),
        last=nn.Linear(4, 2),
    )
    model.norm.running_mean.normal_()
    if hold == "weight as a buffer":
        model.register_buffer("beside", model.last.weight.detach()[:, :3])
    elif hold == "weight":
        model.beside = model.last.weight.data
    elif hold == "statistic":
        model.beside = model.norm.running_var.view(2, 2)
    return model.eval()


def mean(model: Any, y: Tensor) -> Tensor:
    return y * model.norm.running_mean[0].item()


def branch(model: Any, y: Tensor) -> Tensor:
    return y if model.norm.running_mean[1] > 0 else y + 1


def beside(model: Any, y: Tensor) -> Tensor:
    return y + model.beside.sum()


def number_beside(model: Any, y: Tensor) -> Tensor:
    return y * model.beside[0, 0].item()


CASES = {
    "mean": (mean, ""),
    "branch": (branch, ""),
    "statistic": (beside, "statistic"),
    "statistic, number": (number_beside, "statistic"),
    "weight": (beside, "weight"),
    "weight, number": (number_beside, "weight"),
    "weight as a buffer": (beside, "weight as a buffer"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_outside_of_its_layer_is_not_rescaled(name: str) -> None:
    model, x = holding(*CASES[name]), torch.randn(5, 3)
    graph, before = ps.trace(model, x), model(x)
    ps.rescale_(model, graph, torch.randn(graph.num_units, dtype=torch.float64))
    assert torch.allclose(model(x), before, rtol=1e-4, atol=1e-4)
    # the channels of the norm, or the units behind it
    assert graph.num_units == 4
    told = [pin for pin in graph.pinned if "last.weight" in pin.parameters]
    assert bool(told) == name.startswith("weight")
