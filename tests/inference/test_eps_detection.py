"""Constants beside an eps, outputs without numbers, norms of few numbers: what `verify` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import mlp, network
from slow_names import slow_names
from torch import Tensor, nn

import pathspace as ps


def shifted(net: Any, x: Tensor) -> Tensor:
    """A small constant of the same size on a line of its own, which is not an eps."""
    x = net.first(x)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4)
    return net.last(torch.relu(x - 1e-4))


def test_only_the_constant_that_was_taken_for_an_eps_is_left_out() -> None:
    model, x = (
        network(shifted, first=mlp(3, 4, bias=False), last=mlp(4, 1, bias=False)),
        torch.randn(5, 3),
    )
    graph = ps.trace(model, x)
    assert [value for _, value in graph.folded_eps] == [1e-4]
    assert any("constant" in pin.reason for pin in graph.pinned)
    certificate = ps.verify(model, x)
    assert certificate.holds and certificate.approximate_units
    assert certificate.invariance["rescaling_as_it_stands"] > 1e-9


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
