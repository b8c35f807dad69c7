"""Norms over groups of channels before and after sums, as in diffusion networks."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathspace as ps


class GroupedResidual(nn.Module):
    """A residual block with norms over groups of channels before and after its sum."""

    def __init__(self, groups: int, width: int) -> None:
        super().__init__()
        self.i, self.n = nn.Conv2d(2, width, 1), nn.GroupNorm(groups, width)
        self.c, self.m = nn.Conv2d(width, width, 1), nn.GroupNorm(groups, width)
        self.o = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        x = self.i(x)
        x = x + self.c(F.silu(self.n(x)))
        return self.o(F.silu(self.m(x)))


@pytest.mark.parametrize(("groups", "width"), [(1, 4), (2, 4), (2, 6), (3, 6), (4, 4)])
def test_both_operands_of_a_sum_have_the_units_of_its_groups(groups: int, width: int) -> None:
    """One unit per group, at every weight that writes the stream; the function stays the same."""
    torch.manual_seed(0)
    model, x = GroupedResidual(groups, width).double().eval(), torch.randn(2, 2, 5, 5).double()
    for norm in (model.n, model.m):
        norm.eps = 0.0
    graph = ps.trace(model, x)
    heads = {block.name: block.head.reshape(-1).tolist() for block in graph.blocks}
    assert heads["i.weight"] == heads["c.weight"] == heads["i.bias"] == heads["c.bias"]
    assert graph.num_units == len(set(heads["c.weight"])) == groups
    phi = torch.randn(graph.num_units, dtype=torch.float64)
    scaled = ps.rescale_(deepcopy(model), graph, phi, exact=False)
    assert torch.allclose(scaled(x), model(x), rtol=1e-10, atol=1e-12)


class NormOfAView(nn.Module):
    """A sum reads groups of a stream with one dimension less, or more, than the norm before it."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.more = more
        self.i, self.c, self.o = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        groups = self.i(x).unflatten(-1, (2, 2))
        normed = F.normalize(groups if self.more else groups[None], dim=-2)
        update = self.c(normed.flatten(-2)).unflatten(-1, (2, 2))
        y = (groups[None] if self.more else groups) + update
        return self.o(F.normalize(y, dim=-2).flatten(-2))


@pytest.mark.parametrize("more", [False, True])
def test_tied_groups_are_read_with_any_number_of_dimensions(more: bool) -> None:
    """The ids of both have the same memory, and one unit per group."""
    model, x = NormOfAView(more).double(), torch.randn(5, 3).double()
    graph = ps.trace(model, x)
    assert graph.num_units == 2
    phi = torch.randn(2, dtype=torch.float64)
    scaled = ps.rescale_(deepcopy(model), graph, phi, exact=False)
    assert torch.allclose(scaled(x), model(x), rtol=1e-10, atol=1e-12)
