"""Statistics of moving averages, measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from notebook import notebook
from torch import nn

page = notebook("moving_average")


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("h", [0.3, 2.0])
def test_the_stability_limit_is_where_the_probe_diverges(decay: float, h: float) -> None:
    limit = page.stability_limit(decay, h)
    low, high = 0.5 * limit, 2 * limit
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle) if page.quadratic_probe(decay, middle, h, 4000)[0] else (middle, high)
        )
    assert low == pytest.approx(limit, rel=0.005)
    assert page.contraction(decay, limit, h) == pytest.approx(1, abs=1e-9)


def test_a_large_decay_costs_monotony_not_stability() -> None:
    assert page.quadratic_probe(0.99, 1.0)[1] > 50 and not page.quadratic_probe(0.99, 1.0)[0]
    for decay in (0.3, 0.9):
        limit = page.monotone_limit(decay, 1.0)
        turns = [page.quadratic_probe(decay, factor * limit)[1] for factor in (0.98, 4)]
        assert turns[0] == 0 < turns[1]


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_stationary_variance(decay: float) -> None:
    random = np.random.default_rng(0)
    g, total, count = np.zeros(4000), 0.0, 0
    for step in range(int(60 / (1 - decay))):
        g = decay * g + (1 - decay) * random.normal(size=4000)
        if step > 20 / (1 - decay) and step % max(1, int(2 / (1 - decay))) == 0:
            total, count = total + float(g.var()), count + 1
    assert total / count == pytest.approx(page.stationary_variance(decay), rel=0.03)


def test_sampling_without_replacement() -> None:
    random = np.random.default_rng(0)
    data = random.normal(size=200)
    means = [random.permutation(data)[:100].mean() for _ in range(20000)]
    assert float(np.var(means)) == pytest.approx(
        data.var() * page.sampling_factor(100, 200), rel=0.05
    )
    assert page.sampling_factor(200, 200) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "decay"), [(3.0, 0.8), (0.1, 0.0), (1e4, 0.999)])
def test_suggested_decay(noise: float, decay: float) -> None:
    """The gradient is 1 + noise: at a noise of 9 and a signal of 1, (1 - g) / (1 + g) = 1/9."""
    model, one = nn.Linear(1, 1, bias=False).double(), torch.ones(1, 1).double()
    batches = [(one, 1 + noise * torch.randn(1, 1).double()) for _ in range(1500)]
    found = page.suggested_decay(model, lambda y, t: (y * t).sum(), batches)
    assert found == pytest.approx(decay, abs=0.05 if decay == 0.8 else 0)
