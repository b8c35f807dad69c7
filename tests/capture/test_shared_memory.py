"""Parameters and running statistics whose numbers code also reads in another way keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps


class Held(nn.Module):
    """Two linear maps around a batch norm, and tensors that are held beside them."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor], hold: str = "") -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.norm.running_mean.normal_()
        self.read = read
        if hold == "weight as a buffer":
            self.register_buffer("beside", self.last.weight.detach()[:, :3])
        elif hold == "weight":
            self.beside = self.last.weight.data
        elif hold == "statistic":
            self.beside = self.norm.running_var.view(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.last(torch.relu(self.norm(self.first(x)))))


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
    torch.manual_seed(0)
    model, x = Held(*CASES[name]).eval(), torch.randn(5, 3)
    graph, before = ps.trace(model, x), model(x)
    ps.rescale_(model, graph, torch.randn(graph.num_units, dtype=torch.float64))
    assert torch.allclose(model(x), before, rtol=1e-4, atol=1e-4)
    # the channels of the norm, or the units behind it
    assert graph.num_units == 4
    told = [pin for pin in graph.pinned if "last.weight" in pin.parameters]
    assert bool(told) == name.startswith("weight")
