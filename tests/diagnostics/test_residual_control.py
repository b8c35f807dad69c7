"""Residual control against explicit Jacobians."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.autograd.functional import jacobian as explicit

from pathspace.diagnostics.signal.control import residual_control
from pathspace.errors import InputError


class Block(nn.Module):
    def __init__(self, width: int, scale: float, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.into, self.act, self.out, self.scale = (
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            scale,
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z + self.scale * self.out(self.act(self.into(self.norm(z))))


def stack(scale: float, depth: int = 4, norm: bool = False) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return (
        nn.Sequential(*[Block(6, scale, norm) for _ in range(depth)]).double(),
        torch.randn(1, 6).double(),
    )


def test_against_explicit_matrices() -> None:
    model, x = stack(0.5, norm=True)
    found = residual_control(model, x, types=Block)
    eye, steps, z = torch.eye(6).double(), [], x
    for block in model:
        steps.append(explicit(block, z).reshape(6, 6))
        z = block(z).detach()
    total = explicit(model, x).reshape(6, 6)
    linear = sum(step - eye for step in steps)

    def norm(matrix: torch.Tensor) -> float:
        return float(torch.linalg.matrix_norm(matrix, 2))

    assert found.span == pytest.approx(norm(total), rel=1e-9)
    assert found.first_order == pytest.approx(norm(linear), rel=1e-9)
    assert found.remainder == pytest.approx(norm(total - eye - linear), rel=1e-9)
    for row, step in zip(found.blocks, steps, strict=True):
        assert row.step == pytest.approx(norm(step), rel=1e-9)
        assert row.branch == pytest.approx(norm(step - eye), rel=1e-9)
        assert (
            row.branch <= 0.5 * row.product * (1 + 1e-9)
            and row.norms != 1
            and row.slack is not None
        )
    errors = [norm(step - eye) for step in steps]
    assert found.remainder_bound == pytest.approx(
        math.prod(1 + e for e in errors) - 1 - sum(errors), rel=1e-9
    )
    assert found.remainder <= found.remainder_bound and found.span <= found.bound


def test_the_remainder_is_of_second_order() -> None:
    sizes = [
        residual_control(*stack(scale), types=Block, inside=False).remainder
        for scale in (0.02, 0.01, 0.005)
    ]
    assert sizes[0] / sizes[1] == pytest.approx(4, abs=0.1) and sizes[1] / sizes[
        2
    ] == pytest.approx(4, abs=0.1)


def test_many_small_branches_are_not_small() -> None:
    # (1.05)^200 = 17293: the size of one branch says nothing without their number
    few, many = (
        residual_control(*stack(0.1, depth), types=Block, inside=False) for depth in (2, 40)
    )
    assert "holds" in few.verdict and "does not hold" in many.verdict
    assert many.remainder_bound > 100 * few.remainder_bound


def test_wider_norms_damp_branches() -> None:
    # the derivative of a normalised branch falls with the standard deviation of what is normalised
    branches = []
    for size in (1.0, 4.0, 16.0):
        model, x = stack(1.0, 1, norm=True)
        branches.append(residual_control(model, size * x, types=Block).blocks[0].branch)
    assert branches[0] / branches[1] == pytest.approx(4, rel=0.01)
    assert branches[1] / branches[2] == pytest.approx(4, rel=0.01)


def test_refusals() -> None:
    model, x = stack(0.1)
    with pytest.raises(InputError, match="found no choice of blocks"):
        residual_control(model, x)
    with pytest.raises(InputError, match="expected equal shapes"):
        residual_control(nn.Sequential(nn.Linear(6, 3)), x.float(), types=nn.Linear)


def test_blocks_have_to_follow_each_other() -> None:
    """The bound multiplies the blocks' norms, which says nothing of what lies
    between two that are apart.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(InputError, match=r"block '2' does not read what block '0' returns"):
        residual_control(model, torch.randn(2, 4), names=["0", "2"])
    found = residual_control(model, torch.randn(2, 4), names=["2", "3"])
    assert found.span <= found.bound * (1 + 1e-6)
