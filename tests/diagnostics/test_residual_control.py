"""Stacks of residual blocks against explicit Jacobians."""

from __future__ import annotations

import math

import pytest
import torch
from notebook import notebook
from torch.autograd.functional import jacobian as explicit

page = notebook("residual_blocks")


def test_against_explicit_matrices() -> None:
    model, x = page.stack(0.5, norm=True)
    found = page.residual_control(model, x)
    eye, steps, z = torch.eye(6).double(), [], x
    for block in model:
        steps.append(explicit(block, z).reshape(6, 6))
        z = block(z).detach()
    total = explicit(model, x).reshape(6, 6)
    linear = sum(step - eye for step in steps)

    def norm(matrix: torch.Tensor) -> float:
        return float(torch.linalg.matrix_norm(matrix, 2))

    errors = [norm(step - eye) for step in steps]
    assert found.branches == pytest.approx(errors, rel=1e-9)
    assert found.span == pytest.approx(norm(total), rel=1e-9)
    assert found.bound == pytest.approx(math.prod(map(norm, steps)), rel=1e-9)
    assert found.first_order == pytest.approx(norm(linear), rel=1e-9)
    assert found.remainder == pytest.approx(norm(total - eye - linear), rel=1e-9)
    assert found.remainder_bound == pytest.approx(
        math.prod(1 + e for e in errors) - 1 - sum(errors), rel=1e-9
    )
    assert found.remainder <= found.remainder_bound and found.span <= found.bound


def test_the_remainder_is_of_second_order() -> None:
    sizes = [page.residual_control(*page.stack(scale)).remainder for scale in (0.02, 0.01, 0.005)]
    assert sizes[0] / sizes[1] == pytest.approx(4, abs=0.1)
    assert sizes[1] / sizes[2] == pytest.approx(4, abs=0.1)
