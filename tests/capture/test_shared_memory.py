"""Parameters and running statistics whose numbers code also reads in another way keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps


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


def beside_in_an_export(model: Any, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return y + model.beside.sum()


def number_beside(model: Any, y: Tensor) -> Tensor:
    return y * model.beside[0, 0].item()


CASES = {
    "mean": (mean, ""),
    "branch": (branch, ""),
    "statistic": (beside, "statistic"),
    "statistic, number": (number_beside, "statistic"),
    "statistic, exported": (beside_in_an_export, "statistic"),
    "weight": (beside, "weight"),
    "weight, number": (number_beside, "weight"),
    "weight, exported": (beside_in_an_export, "weight"),
    "weight as a buffer": (beside, "weight as a buffer"),
    "weight as a buffer, exported": (beside_in_an_export, "weight as a buffer"),
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
