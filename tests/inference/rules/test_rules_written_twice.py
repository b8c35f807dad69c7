"""One network written in two ways has the same units, and keeps its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from rescaled import change
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps

pytestmark = pytest.mark.usefixtures("no_rule_fails")


Form = Callable[[Any, Tensor], Tensor]


def written(function: Form, features: int, **weights: tuple[int, ...]) -> nn.Module:
    """Linear 4 -> 6, ReLU, a few weights in a function, Linear -> 2."""
    return network(
        lambda net, x: net.last(F.relu(function(net, F.relu(net.first(x))))),
        first=nn.Linear(4, 6),
        last=nn.Linear(features, 2),
        **{name: nn.Parameter(torch.randn(shape)) for name, shape in weights.items()},
    ).double()


# plainly, in another way, features they leave, the weights they read
PAIRS: dict[str, tuple[Form, Form, int, dict[str, tuple[int, ...]]]] = {
    "weights glued": (
        lambda m, h: torch.cat([F.linear(h, m.u), F.linear(h, m.v)], -1),
        lambda m, h: F.linear(h, torch.cat([m.u, m.v])),
        5,
        {"u": (2, 6), "v": (3, 6)},
    ),
    "weight before the activation in einsum": (
        lambda m, h: F.linear(h, m.u),
        lambda m, h: torch.einsum("oi,bi->bo", m.u, h),
        3,
        {"u": (3, 6)},
    ),
    "rows of an activation by embedding": (
        lambda m, h: F.linear(h[torch.tensor([0, 2, 1])], m.u),
        lambda m, h: F.linear(F.embedding(torch.tensor([0, 2, 1]), h), m.u),
        3,
        {"u": (3, 6)},
    ),
    "margins by the word same": (
        lambda m, h: F.conv1d(h[:, :, None].expand(-1, -1, 5), m.u, padding=1).mean(-1),
        lambda m, h: F.conv1d(h[:, :, None].expand(-1, -1, 5), m.u, padding="same").mean(-1),
        3,
        {"u": (3, 6, 3)},
    ),
    # operands of other ranks are broadcast before a dimension is counted
    **{
        f"angles along dimension {dim}": (
            lambda m, h: F.cosine_similarity(h[:, None], m.u, dim=-1),
            lambda m, h, dim=dim: F.cosine_similarity(h[..., None], m.u.T, dim=dim),
            3,
            {"u": (3, 6)},
        )
        for dim in (1, -2)
    },
    "a transposed convolution of one pixel": (
        lambda m, h: torch.einsum("ni,iok->nok", h, m.u).sum(-1),
        lambda m, h: F.conv_transpose1d(h[:, :, None], m.u, stride=2).sum(-1),
        3,
        {"u": (6, 3, 2)},
    ),
}


def graph_and_gap(model: nn.Module) -> tuple[ps.ReductionGraph, float]:
    """The graph, and how far random scales of its units move the outputs."""
    x = torch.randn(3, 4).double()
    graph = ps.trace(model, x)
    return graph, change(model, graph, x)


def starts(graph: ps.ReductionGraph) -> dict[str, bool]:
    """Whether the weights of a parameter start at the inputs."""
    return {block.name: not block.tail.any() for block in graph.blocks}


@pytest.mark.parametrize("name", PAIRS)
def test_two_ways_to_write_a_network_have_the_same_units(name: str) -> None:
    plain, other, features, weights = PAIRS[name]
    (a, first), (b, second) = (
        graph_and_gap(written(form, features, **weights)) for form in (plain, other)
    )
    assert max(first, second) < 1e-9
    assert (a.num_units, a.num_weights, len(a.pinned)) == (
        b.num_units,
        b.num_weights,
        len(b.pinned),
    )
    assert a.num_units > 3
    # a weight that is taken for an activation would start where the inputs start
    assert starts(a) == starts(b)


def test_counts_leave_features_free() -> None:
    """Norms of order 0 count entries that are not 0."""
    for counted in (
        lambda m, h: F.pairwise_distance(h, h.flip(0), p=0, eps=0.0)[:, None] * m.u,
        lambda m, h: torch.linalg.vector_norm(h, 0, dim=1, keepdim=True) * m.u,
        lambda m, h: h.norm(p=0, dim=1, keepdim=True) * m.u,
    ):
        graph, gap = graph_and_gap(written(counted, 3, u=(1, 3)))
        assert graph.num_units == 9 and gap < 1e-9
