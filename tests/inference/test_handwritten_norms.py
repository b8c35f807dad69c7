"""Which constants of a norm written out by hand are its eps."""

from __future__ import annotations

from typing import Any

import torch
from cases import mlp, network
from torch import Tensor

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
