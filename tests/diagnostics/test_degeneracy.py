"""Degeneracy: every direction counted, explained or labelled."""

from __future__ import annotations

import pytest
import torch
from cases import network
from torch import nn

from pathspace.diagnostics.parameters.degeneracy import degeneracy
from pathspace.errors import InputError


def dead_units(model: nn.Sequential, x: torch.Tensor) -> int:
    return int((model[1](model[0](x)) == 0).all(0).sum())


@pytest.mark.parametrize("seed", range(12))
def test_one_hidden_layer(seed: int) -> None:
    torch.manual_seed(seed)
    d, h, o = (int(torch.randint(low, 6, ())) for low in (2, 3, 1))
    model = nn.Sequential(
        nn.Linear(d, h, bias=seed % 2 == 0), nn.ReLU(), nn.Linear(h, o, bias=seed % 3 > 0)
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if seed % 4 == 0:
        model[0].bias.data[0] = -1e3
    x = 3 * torch.randn(60 * h, d).double()
    found = degeneracy(model, x)
    dead = dead_units(model, x)
    assert dead >= (seed % 4 == 0)
    assert found.dead == dead * (d + (seed % 2 == 0) + o)
    assert found.gauge == h - dead and found.unexplained == found.undetermined == 0
    assert found.deficit == found.gauge + found.dead and found.clear
    assert sum(row.dead for row in found.tensors) == found.dead
    assert sum(row.gauge or 0 for row in found.tensors) == pytest.approx(found.gauge, abs=1e-9)


def test_tanh_has_none_and_one_of_two_added_matrices_is_redundant() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert degeneracy(model, torch.randn(300, 3)).deficit == 0

    doubled = network(
        lambda net, x: net.u(torch.tanh(x @ (net.v + net.w).T)),
        v=nn.Parameter(torch.randn(4, 3)), w=nn.Parameter(torch.randn(4, 3)), u=nn.Linear(4, 2),
    )  # fmt: skip
    found = degeneracy(doubled, torch.randn(300, 3))
    assert (found.deficit, found.unexplained, found.gauge, found.dead) == (12, 0, 0, 0)
    assert [(each.cause, each.place, each.directions) for each in found.symmetries] == [
        ("redundant", "v and w", 12)
    ]
    # without more outputs than scalars no cause is sought, but the tensors are named
    few = degeneracy(doubled, torch.randn(3, 3))
    assert few.symmetric == 0
    assert sum(row.unexplained or 0 for row in few.tensors) == pytest.approx(
        few.undetermined + few.unexplained, abs=1e-6
    )


@pytest.mark.parametrize(
    ("function", "rank"),
    [
        (lambda a, b, c, x: a * torch.tanh((b + c) * x), 2),
        (lambda a, b, c, x: a * torch.tanh(b * x + c), 3),
        (lambda a, b, c, x: a * torch.relu(b * x + c), 2),
        (lambda a, b, c, x: a * torch.exp(b * x + c), 2),
    ],
)
def test_the_notes_scalar_models(function, rank: int) -> None:
    a, b, c = (nn.Parameter(torch.tensor(value)) for value in (0.7, 1.3, -0.4))
    scalar = network(lambda net, x: function(net.a, net.b, net.c, x), a=a, b=b, c=c)
    found = degeneracy(scalar, torch.linspace(-3, 3, 40))
    assert (found.parameters, found.rank) == (3, rank)


def test_too_little_data_is_said_to_be_too_little() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    found = degeneracy(model, torch.randn(5, 4))
    assert found.outputs == 10
    assert found.undetermined >= 44 - 6 - 10 - found.dead
    assert "more data" in found.notes[0]


def test_large_models_by_sketches() -> None:
    model = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 2))
    model[0].bias.data[:3] = -1e3
    found = degeneracy(model, torch.randn(150, 40), max_rows=120)
    assert found.method == "randomised" and found.rank == 120
    assert found.dead == 3 * (40 + 1 + 2) and found.gauge == 77 and found.unexplained == 0


@pytest.mark.parametrize("max_rows", [2000, 12])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6, 0.1), nn.LayerNorm(6, 0.1), None])
def test_sketches_count_only_rescalings_that_the_jacobian_confirms(
    norm: nn.Module | None, max_rows: int
) -> None:
    between = [] if norm is None else [norm]
    model = nn.Sequential(nn.Linear(4, 6), *between, nn.ReLU(), nn.Linear(6, 3))
    model[-3].bias.data[0] = -1e3
    x = torch.randn(200, 4)
    exact, sketched = degeneracy(model, x), degeneracy(model, x, max_exact=0, max_rows=max_rows)
    assert (exact.method, sketched.method) == ("exact", "randomised")
    assert sketched.gauge == exact.gauge and sketched.dead == exact.dead
    if max_rows == 2000:
        assert sketched.rank == exact.rank
        assert sketched.unexplained == exact.symmetric + exact.unexplained


def test_many_rescalings_are_tested_in_combinations() -> None:
    model = nn.Sequential(nn.Linear(2, 90), nn.ReLU(), nn.BatchNorm1d(90), nn.Linear(90, 1))
    few = degeneracy(model.eval(), torch.randn(40, 2), max_exact=0, max_rows=5)
    assert few.gauge > 0 and "more may do so" in few.notes[1]
    assert few.notes[0].startswith("Not counted: 5 ")


def test_models_that_cannot_be_captured_still_count() -> None:
    branch = network(lambda net, x: net.layer(x) if x.sum() > -1e9 else x, layer=nn.Linear(2, 1))
    found = degeneracy(branch, torch.randn(20, 2))
    assert found.deficit == 0 and "not captured" in found.notes[0]
    with pytest.raises(InputError, match="no trainable"):
        degeneracy(nn.ReLU(), torch.randn(2, 2))


def test_nothing_is_dropped_where_the_rank_is_full() -> None:
    found = degeneracy(nn.Linear(2, 1).double(), torch.randn(5, 2).double())
    assert (found.rank, found.deficit, found.largest_dropped) == (3, 0, 0.0)
    assert found.smallest_kept > 0
