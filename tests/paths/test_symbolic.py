"""The symbolic layer: identities between monomials, and integer matrices that fit together."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
import torch
from cases import CASES, mlp
from oracles.networks import LoopRNN

import pathspace as ps
from pathspace.paths.symbolic import SymbolicSpace, symbolic

NAMES = (
    "mlp_2x1x2x1_nobias",
    "mlp_3x4x2",
    "residual_mlp_nobias",
    "rnn_loop_unequal",
    "gated_product",
    "conv1d",
)


def space_of(name: str) -> SymbolicSpace:
    model, args = CASES[name]()
    return symbolic(ps.trace(model, *args).skeleton())


@pytest.mark.parametrize("name", NAMES)
def test_matrices_fit_together(name: str) -> None:
    space = space_of(name)
    count, gauge = space.counting_matrix, space.gauge_generators
    m, units = space.skeleton.graph.num_weights, space.skeleton.graph.num_units
    assert count.shape == (m - units, m)
    assert gauge.shape == (units, m)
    assert (count * gauge.T).is_zero_matrix
    if m > 45:
        return
    # the kernel computed from the counting matrix is the gauge
    null = sympy.Matrix([list(vector) for vector in count.nullspace()])
    assert null.shape == (units, m)
    assert null.col_join(gauge).rank() == gauge.rank() == units
    assert all(entry.is_Integer for entry in space.inverse)
    assert space.inverse * count[:, list(space.free)] == sympy.eye(m - units)


@pytest.mark.parametrize("name", NAMES)
def test_relations_are_identities_and_equations_of_values(name: str) -> None:
    space = space_of(name)
    graph = space.skeleton.graph
    values = space.basis.values().tolist()
    for path in list(graph.paths())[:25]:
        assert space.check(path)
        left, right = space.equation(path).split(" = ")
        assert left == f"v({path})"
        names = {f"v_{i + 1}": value for i, value in enumerate(values)}
        assert eval(right.replace("^", "**"), {}, names) == pytest.approx(path.value, rel=1e-6)


def test_powers_of_recurrent_weights() -> None:
    graph = ps.trace(LoopRNN(1, [1], 1, bias=False, out_bias=False), torch.randn(1, 4, 1))
    space = symbolic(graph.skeleton())
    texts = [space.equation(path) for path in graph.paths()]
    assert "v(w_x.0.weight[0,0] w_h.0.weight[0,0]^3 head.weight[0,0]) = v_2^3 / v_1^2" in texts


def test_latex_is_shown_in_notebooks() -> None:
    space = space_of("mlp_2x1x2x1_nobias")
    text = space._repr_latex_()
    assert text.startswith("$") and text.endswith("$")
    assert r"\left[\begin{matrix}" in text
    assert text.count("&=") == 3


def test_what_is_no_path_or_too_large_is_refused() -> None:
    space = space_of("mlp_3x4x2")
    # rows of the first matrix enter a unit each, columns of the second leave one
    for weight, unit, times in ((0, 1, "+1"), (5, 2, "+1"), (18, 3, "-1")):
        with pytest.raises(ps.InputError, match=rf"enters unit {unit} \{times} times more"):
            space.relation(np.eye(26, dtype=np.int64)[weight])
    other = space_of("mlp_3x4x2").basis[0]
    with pytest.raises(ps.InputError, match="another graph"):
        space.relation(other)
    with pytest.raises(ps.UnsupportedError, match="at most 200"):
        symbolic(ps.trace(mlp(20, 20, 2), torch.randn(1, 20)).skeleton())
