"""Models whose code keeps what it computes in caches of functions."""

from functools import cache, lru_cache

import torch
from torch import Tensor, nn

import pathspace as ps


@cache
def positions(length: int) -> Tensor:
    return torch.arange(length)


class Placed(nn.Module):
    """Positions come from a cached function, and from a cached method."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(9, 4), nn.Linear(4, 3), nn.Linear(3, 2)

    @staticmethod
    @lru_cache(maxsize=10)
    def mask(length: int) -> Tensor:
        return torch.ones(length, length).tril()

    def forward(self, x: Tensor) -> Tensor:
        h = self.mask(x.shape[0]) @ (x + self.table(positions(x.shape[0])))
        return self.last(torch.relu(self.first(h)))


def test_a_trace_leaves_no_tensor_without_values_in_a_cache() -> None:
    model, x = Placed(), torch.randn(5, 4)
    graph = ps.trace(model, x)
    assert graph.num_units == 3
    assert positions(5).tolist() == [0, 1, 2, 3, 4]
    assert ps.verify(model, x, graph=graph).holds


def test_what_a_cache_held_before_a_trace_does_not_decide_it() -> None:
    model, x = Placed(), torch.randn(6, 4)
    expected = model(x)
    assert ps.trace(model, x).num_units == 3
    assert torch.equal(model(x), expected)
