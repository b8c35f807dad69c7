"""Golden answers: quick rows are as kept, digests know a graph by its rescalings alone, and
differences are told by how grave they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from golden.differences import differences, report
from golden.ends import ends_digest
from golden.rows import read, row_of
from scipy.sparse import csr_array
from torch import Tensor, nn

import pathspace as ps

QUICK = (
    "case/batchnorm_conv train",
    "case/mlp_2x3x5x2 eval",
    "case/mlp_gelu train",
    "case/mlp_prelu_channels eval",
    "case/mlp_softmax train",
    "odd/asserts_values train",
    "odd/computes_in_numpy eval",
    "odd/copied_model eval",
    "odd/raises train",
    "odd/takes_anything eval",
)


@pytest.mark.parametrize("name", QUICK)
def test_quick_answers_are_as_kept(name: str) -> None:
    kept = read()
    found = differences({name: kept[name]}, {name: row_of(name)})
    assert not found, report(found, 1)


def renumbered(graph: ps.ReductionGraph, order: np.ndarray) -> ps.ReductionGraph:
    """The same graph with unit ``k + 1`` called ``order[k] + 1``."""
    count = graph.num_units
    table = np.arange(count + 1 + graph.forms.shape[0])
    table[1 : count + 1] = order + 1

    def moved(ids: Tensor) -> Tensor:
        return torch.from_numpy(table)[ids.abs()] * ids.sign()

    inverse = np.argsort(order)
    return replace(
        graph,
        blocks=tuple(
            replace(block, tail=moved(block.tail), head=moved(block.head).expand(block.shape))
            for block in graph.blocks[::-1]
        ),
        statistics=tuple(replace(each, units=moved(each.units)) for each in graph.statistics),
        forms=csr_array(graph.forms)[:, inverse],
        exact=csr_array(graph.exact)[inverse],
        approximate=np.sort(table[graph.approximate]),
        beyond={name: (moved(one), moved(two)) for name, (one, two) in graph.beyond.items()},
    )


class Products(nn.Module):
    """Products of activations, one of which is read by itself as well."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)
        self.both, self.one = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(x).relu(), self.right(x).relu()
        return self.both(left * right), self.one(left)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval(),
        Products(),
    ],
)
def test_digests_do_not_depend_on_the_numbers_of_units(model: nn.Module) -> None:
    graph = ps.trace(model, torch.randn(5, 3))
    assert graph.num_units
    order = np.random.default_rng(0).permutation(graph.num_units)
    again = renumbered(graph, order)
    for exact in (False, True):
        assert ends_digest(again, exact) == ends_digest(graph, exact)


def test_digests_change_with_one_edge() -> None:
    graph = ps.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3))
    block = graph.blocks[0]
    head = block.head.expand(block.shape).clone()
    head[0, 0] = head[1, 0]
    other = replace(graph, blocks=(replace(block, head=head), *graph.blocks[1:]))
    assert ends_digest(other) != ends_digest(graph)


ROW = {"name": "a", "units": 4, "exact": 4, "ends": "x", "norms": [1.0, 2.0], "pins": {"relu": 1}}


@pytest.mark.parametrize(
    ("change", "group"),
    [
        ({"norms": [1.0 + 1e-9, 2.0]}, None),
        ({"norms": [1.1, 2.0]}, "other"),
        ({"pins": {"relu": 2}}, "other"),
        ({"units": 5}, "unsound-suspect"),
        ({"ends": "y"}, "unsound-suspect"),
        ({"units": 3, "ends": "y"}, "weaker"),
        ({"units": 3, "exact": 5}, "unsound-suspect"),
    ],
)
def test_differences_are_told_by_how_grave_they_are(
    change: dict[str, Any], group: str | None
) -> None:
    found = differences({"a": ROW}, {"a": ROW | change})
    assert [each.group for each in found] == [group] * (group is not None)


def test_an_answer_that_is_lost_is_weaker() -> None:
    lost = {"name": "a", "error": "CaptureError"}
    assert [each.group for each in differences({"a": ROW}, {"a": lost})] == ["weaker"]
    assert [each.group for each in differences({"a": lost}, {"a": ROW})] == ["other"]
    assert [each.group for each in differences({"a": ROW}, {})] == ["other"]
