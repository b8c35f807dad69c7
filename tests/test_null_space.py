"""Null vectors beside known ones, and derivatives by log-scales without gradients of
weights, against slow oracles.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import CASES
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.evidence import null_space, upper_bound
from pathspace.evidence.logscales import family
from pathspace.evidence.null_space import pivots, smallest
from pathspace.evidence.scaled_runs import ScaledRun


@pytest.mark.parametrize("seed", range(12))
def test_pivots_are_independent_and_as_many_as_the_rank(seed: int) -> None:
    draw = np.random.default_rng(seed)
    # sparse enough for rows with one entry, dense enough for circles
    table = draw.integers(-1, 2, (30, 12)) * (draw.random((30, 12)) < (0.1, 0.2, 0.6)[seed % 3])
    table[:, 3] = table[:, 4] - table[:, 5]
    rows = pivots(csr_array(table))
    rank = np.linalg.matrix_rank(table)
    assert len(rows) == rank == np.linalg.matrix_rank(table[rows])


def test_too_many_units_in_circles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(null_space, "MOST_DENSE", 1)
    with pytest.raises(ValueError, match="constraints with cycles"):
        pivots(csr_array([[1, 1], [1, -1]]))


@pytest.mark.parametrize(("size", "null"), [(1, 0), (40, 0), (40, 1), (60, 30)])
def test_smallest_singular_values(size: int, null: int) -> None:
    torch.manual_seed(size)
    matrix = torch.randn(size, size - null).double() @ torch.randn(size - null, size).double()
    values, vectors = smallest(matrix.clone(), 1e-8)
    assert int((values < 1e-8).sum()) == null
    wanted = torch.linalg.svdvals(matrix)
    assert float((matrix @ vectors[:, :null]).norm()) < 1e-8 * float(wanted[0])
    # (an estimate, from above)
    kept = float(wanted[size - null - 1] / wanted[0])
    assert 0.99 * kept < float(values[null]) < 1.5 * kept


class Recurrent(nn.Module):
    """Uses of a weight which no activation can take over."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(5, 4), nn.LSTM(4, 3, batch_first=True)
        self.attend = nn.MultiheadAttention(3, 1, batch_first=True)
        self.own = nn.Parameter(torch.randn(3, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.cell(self.table(tokens))[0]
        h = h + self.attend(h, h, h)[0]
        return (
            F.embedding(tokens, self.table.weight, padding_idx=0).sum()
            + h @ self.own.T
            + torch.cat([self.own] * 2)[0]
        )


def convolutions(
    one: type[nn.Module], other: type[nn.Module], norm: nn.Module, groups: int
) -> nn.Module:
    return nn.Sequential(
        one(4, 6, 3, groups=groups, padding=1), norm, nn.ReLU(), other(6, 4, 3, groups=groups),
        nn.Tanh(), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Recurrent(), torch.randint(0, 5, (2, 4))),
        (convolutions(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d(6), 1), torch.randn(3, 4, 5)),
        (convolutions(nn.Conv1d, nn.ConvTranspose1d, nn.GroupNorm(2, 6), 2), torch.randn(2, 4, 5)),
        (
            convolutions(nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d(6), 2),
            torch.randn(3, 4, 4, 5),
        ),
        (
            nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 1)),
            torch.randn(5, 3),
        ),
    ],
)
def test_factors_on_activations_give_the_sums_of_weights_times_gradients(
    model: nn.Module, x: Tensor
) -> None:
    x = x.double() if x.is_floating_point() else x
    model = model.double()
    model(x)
    scales = family(ps.trace(model, x), model, statistics=False)
    weights = {
        name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()
    }

    def derivatives(leaves: list[Tensor], output: Tensor) -> list[Tensor]:
        probe = torch.randn(
            output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        found = torch.autograd.grad(output, leaves, probe, allow_unused=True)
        return [
            torch.zeros_like(leaf) if d is None else d
            for leaf, d in zip(leaves, found, strict=True)
        ]

    slow = derivatives(list(weights.values()), torch.func.functional_call(model, weights, (x,)))
    grads = dict(zip(weights, slow, strict=True))
    wanted = scales.sums([entry.products(weights, grads) for entry in scales.entries])
    with ScaledRun(scales, weights) as run:
        output = torch.func.functional_call(model, weights, (x,))
    torch.testing.assert_close(
        torch.cat(derivatives(run.leaves, output)), wanted, rtol=1e-9, atol=1e-11
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batchnorm_conv", "residual_cnn", "gated_product"])
def test_the_bound_of_large_models_is_that_of_small_ones(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, args = CASES[name]()
    plain = ps.verify(model, *args, upper_bound=True)
    monkeypatch.setattr(upper_bound, "MOST_VALUES", 0)
    large = ps.verify(model, *args, upper_bound=True)
    assert large.units_at_most == plain.units_at_most == plain.units
    # (an estimate, from above, on more samples)
    assert large.upper_bound["smallest_kept"] > 0.5 * plain.upper_bound["smallest_kept"]


def test_more_small_singular_values_than_are_looked_at_are_no_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upper_bound, "MOST_VALUES", 0)
    monkeypatch.setattr(upper_bound, "MOST_ZERO", 24)

    class Halves(nn.Module):
        """A reciprocal that the rules do not follow, and as many scales as it hides."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 30), nn.Linear(30, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(torch.exp(torch.log(h.abs())))

    certificate = ps.verify(Halves(), torch.randn(8, 3), upper_bound=True)
    assert certificate.units == 0
    assert certificate.units_at_most is None
    assert "more than 24 of" in certificate.upper_bound["evidence"]


class Normed(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.up, self.norm, self.mid, self.down = (
            nn.Linear(3, 6),
            nn.LayerNorm(6, eps),
            nn.Linear(6, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.mid(self.norm(self.up(x)))))


def test_units_that_are_exact_as_the_model_stands_are_bounded_too() -> None:
    torch.manual_seed(0)
    certificate = ps.verify(Normed(1e-3), torch.randn(7, 3), upper_bound=True)
    assert certificate.units_at_most == certificate.units
    bound = certificate.upper_bound
    assert (
        certificate.units_exact
        == bound["exact_found"]
        == bound["exact_at_most"]
        < certificate.units
    )
    assert (
        f"{certificate.units_exact} found, at most {certificate.units_exact}" in bound["evidence"]
    )


@pytest.mark.slow
def test_without_eps_both_levels_are_one() -> None:
    model, args = CASES["residual_cnn"]()
    for mode in (False, True):
        certificate = ps.verify(model.train(mode), *args, upper_bound=True)
        assert certificate.upper_bound["exact_at_most"] == certificate.units_exact
