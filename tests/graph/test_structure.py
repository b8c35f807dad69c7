"""Which scalars a unit moves, and where they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import pathspace as ps


class Gated(nn.Module):
    """A product of activations, a norm with statistics, grouped channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(2, 4, 3, groups=2), nn.BatchNorm1d(4)
        self.one, self.two, self.last = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x))).mean(2)
        return self.last(torch.relu(self.one(x)) * self.two(x))


class Gain(nn.Module):
    """A scale without dimensions between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 1), nn.Linear(1, 2)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)) * self.gain)


MODELS = {
    "gain": (Gain(), (3, 4)),
    "mlp": (
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)),
        (5, 2),
    ),
    "gated": (Gated().eval(), (2, 2, 6)),
    "recurrent": (nn.RNN(2, 3, nonlinearity="relu"), (4, 1, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_slices_of_all_units_make_the_gauge(name: str) -> None:
    model, size = MODELS[name]
    graph = ps.trace(model, torch.randn(size))
    phi = torch.randn(graph.num_units, dtype=torch.float64)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    logs = {key: torch.zeros(tensor.shape, dtype=torch.float64) for key, tensor in tensors.items()}
    for unit in range(1, graph.num_units + 1):
        for part in graph.slices(unit):
            logs[part.name][part.index] += part.power * phi[unit - 1]
    factors = graph.gauge(phi)
    for key, log in logs.items():
        expected = factors.get(key, torch.ones((), dtype=torch.float64)).expand(log.shape)
        torch.testing.assert_close(log.exp(), expected)


def test_units_are_named_by_what_computes_them() -> None:
    model, size = MODELS["gated"]
    graph = ps.trace(model, torch.randn(size))
    names = [graph.activation(unit) for unit in range(1, graph.num_units + 1)]
    assert len(set(names)) == len(names)
    assert {name.partition("[")[0] for name in names} == {"first", "norm", "one", "two"}
    with pytest.raises(ps.InputError, match="unit 0, expected one of 1 to"):
        graph.slices(0)


def test_modules_of_blocks_are_the_models_own() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    graph = ps.trace(model, torch.randn(1, 2))
    owners = {block.name: graph.module(block) for block in graph.blocks}
    assert owners["0.parametrizations.weight.original"] is owners["0.bias"] is model[0]
    assert owners["2.weight"] is owners["2.bias"] is model[2]
    with pytest.raises(ps.InputError, match=r"no parameter 'nothing.weight'"):
        graph.module("nothing.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_are_exact(dtype: torch.dtype) -> None:
    model, size = MODELS["mlp"]
    model = nn.Sequential(
        *(type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in model)
    )
    model, x = model.to(dtype), torch.randn(size, dtype=dtype)
    graph = ps.trace(model, x)
    phi = (
        torch.arange(-40, 40)[torch.randint(80, (graph.num_units,))].double()
        * torch.tensor(2.0).double().log()
    )
    before = model(x)
    assert torch.equal(ps.rescale_(model, graph, phi)(x), before)
