"""Everyday jobs where settings, types and shapes are not those that one thinks of first."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import network
from torch import nn

import pathspace as ps
from pathspace import InputError


def scaled(slope: float = 0.01, factor: float = 1.0, eps: float = 1e-5) -> nn.Module:
    """A number and a tensor that are not registered."""
    return network(
        lambda net, x: net.b(net.act(net.norm(net.a(x)))) * net.factor,
        a=nn.Linear(4, 6), b=nn.Linear(6, 3), norm=nn.BatchNorm1d(6, eps=eps),
        act=nn.LeakyReLU(slope), factor=torch.tensor(factor),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "same"),
    [({}, True), ({"slope": 0.9}, False), ({"factor": 5.0}, False), ({"eps": 1e-2}, False)],
)
def test_models_with_other_numbers_in_their_code_are_not_the_same(
    settings: dict[str, float], same: bool
) -> None:
    a, b = scaled().eval(), scaled(**settings).eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(5, 4)
    graph, groups = ps.trace(a, x), ps.channels(b, x)
    b = groups.permute({group.name: torch.randperm(len(group)) for group in groups.removable})
    ps.rescale_(b, graph, torch.randn(graph.num_units, dtype=torch.float64))
    found = ps.compare(a, b, graph)
    assert found.same is same and not found.differ
    assert found.outputs is not None and (found.outputs < 1e-4) is same


@pytest.mark.parametrize(
    ("dtype", "phi"), [(torch.float16, 14.0), (torch.float32, 100.0), (torch.float32, -100.0)]
)
def test_scales_beyond_the_range_of_a_type_change_nothing(dtype: torch.dtype, phi: float) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    graph = ps.trace(model, torch.randn(5, 4, dtype=dtype))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"beyond the range of torch\.float"):
        ps.rescale_(model, graph, torch.full((6,), phi))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
