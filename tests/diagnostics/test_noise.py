"""Statistics of moving averages, measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pathspace.diagnostics.parameters.noise import (
    average_weight,
    contraction,
    curvature,
    monotone_limit,
    quadratic_probe,
    sampling_factor,
    stability_limit,
    stationary_variance,
    suggest_decay,
)
from pathspace.errors import InputError, UnsupportedError


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_stationary_variance(decay: float) -> None:
    random = np.random.default_rng(0)
    g, total, count = np.zeros(4000), 0.0, 0
    for step in range(int(60 / (1 - decay))):
        g = decay * g + (1 - decay) * random.normal(size=4000)
        if step > 20 / (1 - decay) and step % max(1, int(2 / (1 - decay))) == 0:
            total, count = total + float(g.var()), count + 1
    assert total / count == pytest.approx(stationary_variance(decay), rel=0.03)
    assert average_weight(decay, 7) == pytest.approx(1 - decay**7)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("h", [0.3, 2.0])
def test_the_stability_limit_is_where_the_probe_diverges(decay: float, h: float) -> None:
    limit = stability_limit(decay, h)
    low, high = 0.5 * limit, 2 * limit
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle) if quadratic_probe(decay, middle, h, 4000).diverged else (middle, high)
        )
    assert low == pytest.approx(limit, rel=0.005)
    assert contraction(decay, limit, h) == pytest.approx(1, abs=1e-9)


def test_a_large_decay_costs_monotony_not_stability() -> None:
    assert quadratic_probe(0.99, 1.0).ascents > 50 and not quadratic_probe(0.99, 1.0).diverged
    for decay in (0.3, 0.9):
        limit = monotone_limit(decay, 1.0)
        assert (
            quadratic_probe(decay, 0.98 * limit).ascents
            == 0
            < quadratic_probe(decay, 4 * limit).ascents
        )


def test_sampling_without_replacement() -> None:
    random = np.random.default_rng(0)
    data = random.normal(size=200)
    means = [random.permutation(data)[:100].mean() for _ in range(20000)]
    assert float(np.var(means)) == pytest.approx(data.var() * sampling_factor(100, 200), rel=0.05)
    assert sampling_factor(200, 200) == 0


def test_curvature_against_the_hessian() -> None:
    torch.manual_seed(0)
    for width in (4, 12):
        model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()
        x, y = torch.randn(30, 3).double(), torch.randn(30, 1).double()
        named = dict(model.named_parameters())
        sizes = [p.numel() for p in named.values()]

        def loss(
            flat: torch.Tensor, model=model, named=named, sizes=sizes, x=x, y=y
        ) -> torch.Tensor:
            parts = {n: v.view_as(named[n]) for n, v in zip(named, flat.split(sizes), strict=True)}
            return F.mse_loss(torch.func.functional_call(model, parts, (x,)), y)

        flat = torch.cat([p.detach().reshape(-1) for p in named.values()])
        exact = float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))[-1])
        assert curvature(model, F.mse_loss, x, y) == pytest.approx(exact, rel=1e-5)


@pytest.mark.slow
def test_suggested_decay() -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False).double()

    def batches(noise: float, count: int = 1500) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # the gradient of (w x) * t is x t = 1 + noise
        return [
            (torch.ones(1, 1).double(), 1 + noise * torch.randn(1, 1).double())
            for _ in range(count)
        ]

    found = suggest_decay(
        model, lambda y, t: (y * t).sum(), batches(3.0), ratio=1.0, probe_curvature=False
    )
    # noise 9, signal 1: (1 - g)/(1 + g) = 1/9
    assert found.decay == pytest.approx(0.8, abs=0.05)
    assert (
        found.averaged_noise == pytest.approx(found.signal, rel=1e-9) and "decay of" in found.advice
    )
    calm = suggest_decay(model, lambda y, t: (y * t).sum(), batches(0.1), probe_curvature=False)
    assert calm.decay == 0 and "No averaging" in calm.advice
    wild = suggest_decay(model, lambda y, t: (y * t).sum(), batches(1e4), probe_curvature=False)
    assert wild.decay == 0.999 and "drowns" in wild.advice
    data = [(torch.randn(8, 1).double(), torch.randn(8, 1).double()) for _ in range(3)]
    advice = suggest_decay(model, F.mse_loss, data)
    assert advice.stable_lr == pytest.approx(
        stability_limit(advice.decay, float(2 * data[0][0].square().mean()))
    )


def test_refusals() -> None:
    with pytest.raises(InputError, match="never change"):
        stationary_variance(1.0)
    with pytest.raises(InputError, match="positive"):
        stability_limit(0.5, 0.0)
    with pytest.raises(InputError, match="batch <= population"):
        sampling_factor(3, 2)
    with pytest.raises(InputError, match="at least two batches"):
        suggest_decay(nn.Linear(1, 1), F.mse_loss, [])


def test_curvature_through_attention_and_without_second_derivatives() -> None:
    """The fused attention kernels have no second derivative, and the
    embedding bag has none at all.
    """
    torch.manual_seed(0)
    layer, x = (
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        torch.randn(2, 3, 4),
    )
    loss = lambda y, _: y.square().mean()  # noqa: E731
    assert math.isfinite(curvature(layer, loss, x, None))
    bag = nn.EmbeddingBag(5, 2, mode="sum")
    batches = [(torch.tensor([[0, 1]]), None), (torch.tensor([[2, 3]]), None)]
    with pytest.raises(UnsupportedError, match="no second derivative"):
        curvature(bag, loss, *batches[0])
    advice = suggest_decay(bag, loss, batches)
    assert advice.curvature is None and "cannot be computed" in advice.advice
