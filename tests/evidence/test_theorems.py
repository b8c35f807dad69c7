"""Exact ranks, and what the theorems say about a graph at large."""

from __future__ import annotations

import numpy as np
import pytest
from brute_force import FAMILIES, disagreement, draw
from cases import CASES
from oracles.exact import exact_rank
from scipy.sparse import csr_array
from torch import Tensor, nn

import pathspace as ps
from pathspace.paths.counting_vectors import modular_rank


def test_modular_rank_is_the_rank() -> None:
    generator = np.random.default_rng(0)
    for _ in range(30):
        shape = generator.integers(1, 9, 2)
        matrix = generator.integers(-2, 3, (shape[0], 3)) @ generator.integers(-2, 3, (3, shape[1]))
        assert modular_rank(matrix) == modular_rank(csr_array(matrix)) == exact_rank(matrix)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64, object])
def test_ranks_of_every_type_of_integer(dtype: type) -> None:
    assert modular_rank(np.array([[1, 2], [2, 4]], dtype)) == 1
    assert modular_rank(np.array([[2**62, 1], [3, 5]], object)) == 2
    assert modular_rank(np.zeros((0, 3), dtype)) == 0


def test_theorem_1_shows_a_relation_between_values() -> None:
    certificate = ps.verify(*_case("mlp_2x1x2x1_nobias"))
    left, right = certificate.theorem1["example"].split(" = ")
    assert left.startswith("v(0.weight[")
    assert right == "v_2 * v_3 / v_1"


def _case(name: str) -> tuple[nn.Module, Tensor]:
    model, args = CASES[name]()
    return model, args[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_architectures_agree_with_brute_force(family: str) -> None:
    """A few of the ten thousand; the script runs the rest."""
    compared = 0
    for seed in range(6):
        spec = draw(family, 1000 + seed)
        try:
            assert disagreement(family, spec, seed) is None
            compared += 1
        except OverflowError:
            continue
    assert compared > 2
