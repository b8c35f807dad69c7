"""Trees with units that hang on others by the opposite scale, or by a power of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import Between
from torch import Tensor
from training_pairs import problem

import pathspace as ps
from pathspace.training import GSGD, GAdam
from tests.gauge.test_balance import change_and_sizes

RULES = ("modulo", "magnitude", "random")
NAME = "opposite_parents"


@pytest.mark.parametrize("rule", RULES)
def test_walks_with_opposite_parents_are_invariant(rule: str) -> None:
    model = problem(NAME).model
    graph = ps.trace(model, *problem(NAME).args)
    skeleton = graph.skeleton(rule, seed=3)
    assert (
        not graph.forms.shape[0]
        and (skeleton.tree_in.other < 0).any()
        and (skeleton.tree_out.own < 0).any()
    )
    change, _ = change_and_sizes(model, graph)
    basis = skeleton.basis()
    matrix = basis.counting_matrix().toarray()
    # a gauge transformation moves no path value
    assert not (matrix @ change).any()
    for number, row in enumerate(matrix):
        assert (basis[number].counting_vector == row).all()
    logs = matrix @ graph.weights().abs().log().numpy()
    np.testing.assert_allclose(basis.values().abs().log().numpy(), logs, rtol=1e-9, atol=1e-12)


MAKERS: dict[str, Any] = {
    "SGD": lambda named, s: GSGD(named, lr=0.05, skeleton=s, max_multiplier=1.0),
    "Adam": lambda named, s: GAdam(named, lr=1e-3, skeleton=s),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("rule", RULES)
def test_copies_are_trained_in_the_same_way(maker: str, rule: str) -> None:
    case, runs, make = problem(NAME), [], MAKERS[maker]
    for model in case.twins(2):
        skeleton = ps.trace(model, *case.args).skeleton(rule, seed=3)
        runs.append(case.train(model, lambda m, s=skeleton: make(m.named_parameters(), s), 8))
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-8)
    assert runs[0][-1] < runs[0][0]


@pytest.mark.parametrize(
    ("power", "units"),
    [
        (lambda h: h.sqrt().square(), 4),
        (lambda h: h.sqrt() * h.sqrt(), 4),
        (lambda h: h.square(), 4),
        (lambda h: torch.cat([h.sqrt(), h], -1)[..., 2:6], 4),
        (lambda h: h**1.5, 0),
        (lambda h: h ** (2 / 3), 0),
    ],
)
def test_fractional_powers_have_trees(power: Callable[[Tensor], Tensor], units: int) -> None:
    """Where weights meet powers of a scale only, their common multiple is the unit;
    without one it is pinned.
    """

    model, x = Between(lambda h: power(torch.relu(h)), 4, 3, 4), torch.randn(5, 3)
    graph = ps.trace(model, x)
    assert graph.num_units == units
    assert [pin.elements for pin in graph.pinned if "powers" in pin.reason] == (
        [4] if units == 0 else []
    )
    for rule in ("modulo", "magnitude", "random"):
        assert len(graph.skeleton(rule).basis()) == graph.dimension
    assert ps.verify(model, x).holds
