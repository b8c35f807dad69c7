"""Spectra from products against explicit matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import network
from scipy.sparse.linalg import aslinearoperator
from torch import nn
from torch.autograd.functional import jacobian as explicit

from pathspace.diagnostics.signal.spectra import jacobian, spectrum, top_singular, trace_k
from pathspace.errors import InputError, UnsupportedError


def model_and_batch(seed: int = 0) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(30, 80), nn.Tanh(), nn.Linear(80, 90), nn.ReLU(), nn.Linear(90, 70)
    ).double()
    return model, torch.randn(1, 30).double()


@pytest.mark.parametrize(("start", "end"), [(None, None), ("0", None), (None, "2"), ("1", "3")])
def test_the_operator_is_the_explicit_jacobian(start: str | None, end: str | None) -> None:
    model, x = model_and_batch()
    first = 0 if start is None else int(start) + 1
    last = len(model) if end is None else int(end) + 1
    z = model[:first](x).detach()
    matrix = explicit(model[first:last], z).reshape(-1, z.numel()).numpy()
    found = jacobian(model, x, start=start, end=end)
    assert found.shape == matrix.shape
    assert np.abs(found.dense() - matrix).max() < 1e-13
    random = np.random.default_rng(0)
    u, v = random.normal(size=matrix.shape[1]), random.normal(size=matrix.shape[0])
    assert np.abs(found.matvec(u) - matrix @ u).max() < 1e-13
    assert np.abs(found.rmatvec(v) - v @ matrix).max() < 1e-13
    exact = float((matrix**2).sum()) / matrix.shape[1]
    estimate = trace_k(found, 60)
    assert estimate.agrees(exact) and estimate.error < 0.2 * exact
    values = np.linalg.svd(matrix, compute_uv=False)
    for one, value in zip(top_singular(found, 5), values, strict=False):
        assert abs(one.value - value) <= one.error + 1e-10
        assert one.error < 1e-6
    density = spectrum(found, probes=10, steps=30)
    assert density.trace_k().agrees(exact)
    assert density.largest == pytest.approx(values[0], rel=1e-9)
    assert density.below(values[len(values) // 2]).agrees(0.5, 5)


def test_low_rank_is_semidefinite_not_definite() -> None:
    random = np.random.default_rng(0)
    matrix = random.normal(size=(80, 30)) @ random.normal(size=(30, 80))
    estimate = trace_k(aslinearoperator(matrix), 200)
    assert estimate.agrees(float((matrix**2).sum()) / 80)
    found = top_singular(aslinearoperator(matrix), 40)
    assert found[29].value > 1e-6 > found[30].value


def test_refusals() -> None:
    model, x = model_and_batch()
    with pytest.raises(InputError, match="no layer 'nowhere'"):
        jacobian(model, x, start="nowhere")
    with pytest.raises(InputError, match="does not depend"):
        jacobian(model, x, start="3", end="1")
    with pytest.raises(InputError, match="floating-point"):
        jacobian(nn.Embedding(3, 2), torch.tensor([1]))
    operator = aslinearoperator(np.eye(3))
    with pytest.raises(InputError, match="trace_k"):
        trace_k(operator, probes=1)


def test_singular_values_where_restarts_lead_nowhere() -> None:
    """A map that is zero, and single precision asked for more digits than it has."""
    (zero,) = top_singular(aslinearoperator(np.zeros((90, 80))), 1)
    assert (zero.value, zero.error) == (0.0, 0.0)
    # values of which there are several
    matrix = np.diag(np.repeat([3.0, 2.0, 1.0], [2, 2, 96]))
    assert [one.value for one in top_singular(aslinearoperator(matrix), 5)] == pytest.approx(
        [3, 3, 2, 2, 1]
    )
    assert spectrum(aslinearoperator(matrix), 20, 5).below(1.5).agrees(0.96)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 120), nn.Tanh(), nn.Linear(120, 90))
    operator = jacobian(model, torch.randn(1, 100))
    (top,) = top_singular(operator, 1, tolerance=1e-14)
    assert top.value == pytest.approx(np.linalg.norm(operator.dense(), 2), rel=1e-4)
    assert top.error < 1e-3 * top.value


def test_products_that_are_not_finite_are_told() -> None:
    root = network(lambda net, x: x.sqrt())
    with pytest.raises(UnsupportedError, match="root, norm or logarithm of zero"):
        trace_k(jacobian(root, torch.zeros(1, 3)), 4)
