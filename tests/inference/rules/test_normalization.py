"""Norms over groups of channels before and after sums, as in diffusion networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import network
from rescaled import traced
from torch import Tensor, nn
from torch.nn import functional as F


def residual(net: Any, x: Tensor) -> Tensor:
    x = net.i(x)
    x = x + net.c(F.silu(net.n(x)))
    return net.o(F.silu(net.m(x)))


@pytest.mark.parametrize(("groups", "width"), [(1, 4), (2, 4), (2, 6), (3, 6), (4, 4)])
def test_both_operands_of_a_sum_have_the_units_of_its_groups(groups: int, width: int) -> None:
    """One unit per group, at every weight that writes the stream."""
    i, c, o = nn.Conv2d(2, width, 1), nn.Conv2d(width, width, 1), nn.Conv2d(width, 2, 1)
    n, m = (nn.GroupNorm(groups, width, eps=0.0) for _ in range(2))
    model = network(residual, i=i, n=n, c=c, m=m, o=o).double().eval()
    graph = traced(model, torch.randn(2, 2, 5, 5).double(), units=groups)
    heads = {block.name: block.head.reshape(-1).tolist() for block in graph.blocks}
    assert heads["i.weight"] == heads["c.weight"] == heads["i.bias"] == heads["c.bias"]
    assert len(set(heads["c.weight"])) == groups
