"""Constant masks on parameters: what a mask removes lies on no path, and neither does
what follows from it alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps


class Masked(nn.Module):
    """A vector and a matrix of parameters, each with a constant mask, and a layer behind."""

    def __init__(self, use: Callable[[Masked, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.matrix = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))
        self.out, self.use = nn.Linear(4, 2), use

    def some(self) -> Tensor:
        return self.w * torch.tensor([1.0, 0.0, 1.0, 1.0])

    def lower(self) -> Tensor:
        return self.matrix * torch.ones(4, 4).tril()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


relu = torch.relu
THREE, TRIANGLE = torch.tensor([True, False, True, True]), torch.ones(4, 4, dtype=torch.bool).tril()
# use of the masked parameters -> scalars on paths, units
USES: dict[str, tuple[Callable[[Masked, Tensor], Tensor], int, int]] = {
    "a diagonal first": (lambda m, x: m.out(x * m.some()), 3 + 6 + 2, 3),
    "a diagonal last": (lambda m, x: x * m.some(), 3, 0),
    "a diagonal between": (
        lambda m, x: m.out(relu(relu(x @ m.matrix) * m.some())),
        12 + 3 + 6 + 2,
        6,
    ),
    "a row of a triangle": (lambda m, x: m.out(relu(x * m.lower()[0])), 1 + 2 + 2, 1),
    "a triangle": (lambda m, x: m.out(relu(x @ m.lower())), 10 + 8 + 2, 4),
    "used whole behind the mask": (lambda m, x: relu(x * m.some()) * m.w, 3, 0),
    "a matrix behind the mask": (lambda m, x: relu(x * m.some()) @ m.matrix, 3 + 12, 3),
    "a matrix twice behind the mask": (
        lambda m, x: relu(relu(x * m.some()) @ m.matrix) @ m.matrix,
        3 + 16,
        1,
    ),
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
    "a triangle of conditions": (
        lambda m, x: m.out(relu(x @ (m.matrix * TRIANGLE))),
        10 + 8 + 2,
        4,
    ),
    "a triangle that is chosen": (
        lambda m, x: m.out(relu(x @ torch.where(TRIANGLE, m.matrix, 0.0))),
        10 + 8 + 2,
        4,
    ),
    "features under a condition": (lambda m, x: m.out(relu(x @ m.matrix) * THREE), 12 + 6 + 2, 3),
    "features beside a condition": (lambda m, x: m.out(relu(x @ m.matrix) + ~THREE), 16 + 8 + 2, 3),
}


@pytest.mark.parametrize("name", USES)
def test_units_behind_masked_scalars_are_not_counted(name: str) -> None:
    use, weights, units = USES[name]
    torch.manual_seed(0)
    certificate = ps.verify(Masked(use), torch.randn(5, 4))
    assert certificate.holds, certificate
    assert (certificate.weights, certificate.units) == (weights, units)
    assert certificate.method == "exact"
    assert certificate.theorem1["exhaustive"]


def test_channels_under_a_condition_are_those_under_a_mask_of_numbers() -> None:
    def groups(mask: Tensor) -> str:
        model = Masked(lambda m, x: m.out(relu(x @ m.matrix) * mask))
        return repr(ps.channels(model, torch.randn(5, 4)).groups)

    assert groups(THREE) == groups(THREE.float())
