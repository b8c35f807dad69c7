"""Products of rows that data selects: units counted by hand, paths through every pair of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from rescaled import traced
from torch import Tensor, nn

import pathspace as ps

WIDTH, ROWS = 2, 5
Rows = tuple[Tensor, ...]


def products(form: str) -> Any:
    """A linear layer on products of rows of three tables, which one index of three columns reads.

    ``a_k`` in the comments below is the log-scale of column k of table a.
    """

    def read(model: Any, index: Tensor) -> Tensor:
        rows = tuple(table(index) for table in (model.a, model.b, model.c, model.matrices))
        return torch.cat(FORMS[form][0](model, rows), 1)

    model: Any = network(
        lambda net, index: net.out(read(net, index)),
        **{name: nn.Embedding(ROWS, WIDTH) for name in "abc"},
        matrices=nn.Embedding(ROWS, WIDTH * WIDTH),
        first=nn.Linear(WIDTH, WIDTH),
        second=nn.Linear(WIDTH, WIDTH),
        scale=nn.Parameter(torch.ones(WIDTH)),
    )
    model.out = nn.Linear(read(model, INDEX).shape[1], 3)
    return model.double()


INDEX = torch.cartesian_prod(*[torch.arange(ROWS)] * 3)
Form = Callable[[Any, Rows], list[Tensor]]


def _dense(model: Any, rows: Rows) -> list[Tensor]:
    a, b = rows[:2]
    return [
        torch.relu(model.first(a[:, 0])) * b[:, 1],
        torch.relu(model.second(a[:, 1])) * b[:, 2],
    ]


def _towers(model: Any, rows: Rows) -> list[Tensor]:
    a, b, c = rows[:3]
    both = torch.relu(model.first(a[:, 0])) * torch.relu(model.second(b[:, 1]))
    return [both.sum(-1, keepdim=True), c[:, 0]]


def _matrices(_: Any, rows: Rows) -> list[Tensor]:
    a, b = rows[:2]
    u = rows[3].view(-1, 3, WIDTH, WIDTH)
    return [(u[:, 0] @ a[:, 1, :, None])[..., 0], (u[:, 1] @ b[:, 0, :, None])[..., 0]]


FORMS: dict[str, tuple[Form, int]] = {
    # all of a_k and b_k, and c_k where it is read
    "two tables": (lambda _, r: [r[0][:, 0] * r[1][:, 1]], 4),
    "each with each": (
        lambda _, r: [r[i][:, j] * r[j][:, i] for i, j in [(0, 1), (0, 2), (1, 2)]],
        6,
    ),
    "three": (lambda _, r: [r[0][:, 0] * r[1][:, 1] * r[2][:, 2], r[1][:, 0] * r[2][:, 1]], 6),
    "stacked": (lambda _, r: [r[0][:, 0] * r[1][:, 1], r[1][:, 1] * r[2][:, 2]], 6),
    "with a rectified row": (
        lambda _, r: [r[0][:, 0] * torch.relu(r[1][:, 0]), r[2][:, 0] * torch.relu(r[1][:, 1])],
        6,
    ),
    # c_k = a_k + b_k
    "added": (
        lambda _, r: [torch.addcmul(r[2][:, i], r[0][:, i], r[1][:, 1 - i]) for i in (0, 1)],
        4,
    ),
    # b is fixed by the 1
    "divided": (
        lambda _, r: [r[0][:, 0] / (1 + r[1][:, 1].abs()), r[0][:, 1] * r[1][:, 0]],
        2,
    ),
    # a_k + b_k is the same for all k
    "summed": (
        lambda _, r: [(r[0][:, i] * r[1][:, i + 1]).sum(-1, keepdim=True) for i in (0, 1)],
        3,
    ),
    "outer": (lambda _, r: [torch.einsum("bi,bj->bij", r[0][:, 0], r[1][:, 1]).flatten(1)], 4),
    # a_k, b_k, and the outputs of two layers
    "with layers": (_dense, 8),
    # a_k, b_k, c_k, and the outputs of two layers, whose sums are the same for all k
    "two towers": (_towers, 9),
    # u_kj = o_k - a_j, and b_j - a_j is the same for all j
    "matrices": (_matrices, 5),
    # one parameter for both tables
    "scaled": (lambda m, r: [r[0][:, 0] * m.scale, r[1][:, 1] * m.scale], 6),
    # the rows of one table
    "one table": (lambda _, r: [r[0][:, 0] * r[0][:, 1]], 2),
    "one table, unbound": (lambda _, r: [torch.mul(*r[0].unbind(1)[:2])], 2),
    "factorisation machine": (lambda _, r: [r[0].sum(1) ** 2 - (r[0] ** 2).sum(1)], 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_products_of_rows_have_the_units_counted_by_hand(form: str) -> None:
    model = products(form)
    graph = traced(model, INDEX, units=FORMS[form][1], within=1e-5)
    assert not graph.pinned or form == "divided"
    certificate = ps.verify(model, INDEX)
    assert certificate.holds, certificate
    if form != "divided":  # (a quotient has no paths)
        found = certificate.theorem3["evidence"]
        assert found.endswith(f"paths of the network have rank {graph.dimension}"), found
