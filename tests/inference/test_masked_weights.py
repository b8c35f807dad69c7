"""Constant masks on parameters: what a mask removes lies on no path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps

Use = Callable[[Any, Tensor], Tensor]


def masked(use: Use) -> nn.Module:
    """A vector and a matrix of parameters, each with a constant mask, and a layer behind."""
    w, matrix = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))
    return network(use, w=w, matrix=matrix, out=nn.Linear(4, 2))


def some(model: Any) -> Tensor:
    return model.w * torch.tensor([1.0, 0.0, 1.0, 1.0])


def lower(model: Any) -> Tensor:
    return model.matrix * torch.ones(4, 4).tril()


relu = torch.relu
THREE, TRIANGLE = torch.tensor([True, False, True, True]), torch.ones(4, 4, dtype=torch.bool).tril()
# use of the masked parameters -> scalars on paths, units
USES: dict[str, tuple[Use, int, int]] = {
    "a diagonal first": (lambda m, x: m.out(x * some(m)), 3 + 6 + 2, 3),
    "a diagonal last": (lambda m, x: x * some(m), 3, 0),
    "a diagonal between": (
        lambda m, x: m.out(relu(relu(x @ m.matrix) * some(m))),
        12 + 3 + 6 + 2,
        6,
    ),
    "a row of a triangle": (lambda m, x: m.out(relu(x * lower(m)[0])), 1 + 2 + 2, 1),
    "a triangle": (lambda m, x: m.out(relu(x @ lower(m))), 10 + 8 + 2, 4),
    "a matrix behind the mask": (lambda m, x: relu(x * some(m)) @ m.matrix, 3 + 12, 3),
    "features times complex numbers": (
        lambda m, x: m.out((relu(x @ m.matrix) * torch.tensor([1j, 0j, 1j, 1j])).imag),
        12 + 6 + 2,
        3,
    ),
    "frequencies that pass": (
        lambda m, x: m.out(
            torch.fft.irfft(torch.fft.rfft(relu(x @ m.matrix)) * torch.tensor([1, 0, 1j]), n=4)
        ),
        16 + 8 + 2,
        1,
    ),
    # masks of conditions
    "a diagonal of conditions": (lambda m, x: m.out(x * (THREE * m.w)), 3 + 6 + 2, 3),
    "a triangle that is chosen": (
        lambda m, x: m.out(relu(x @ torch.where(TRIANGLE, m.matrix, 0.0))),
        10 + 8 + 2,
        4,
    ),
    "features under a condition": (lambda m, x: m.out(relu(x @ m.matrix) * THREE), 12 + 6 + 2, 3),
}


@pytest.mark.parametrize("name", USES)
def test_units_behind_masked_scalars_are_not_counted(name: str) -> None:
    use, weights, units = USES[name]
    certificate = ps.verify(masked(use), torch.randn(5, 4))
    assert certificate.holds, certificate
    assert (certificate.weights, certificate.units) == (weights, units)
    assert certificate.method == "exact"
    assert certificate.theorem1["exhaustive"]
