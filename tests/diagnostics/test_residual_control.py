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


def test_many_small_branches_are_not_small() -> None:
    # (1.05)^200 = 17293: the size of one branch says nothing without their number
    few, many = (page.residual_control(*page.stack(0.1, depth)) for depth in (2, 40))
    assert sum(few.branches) < 0.5 < sum(many.branches)
    assert many.remainder_bound > 100 * few.remainder_bound


def test_wider_norms_damp_branches() -> None:
    # the derivative of a normalised branch falls with the standard deviation of what is normalised
    model, x = page.stack(1.0, 1, norm=True)
    branches = [page.residual_control(model, size * x).branches[0] for size in (1.0, 4.0, 16.0)]
    assert branches[0] / branches[1] == pytest.approx(4, rel=0.01)
    assert branches[1] / branches[2] == pytest.approx(4, rel=0.01)
