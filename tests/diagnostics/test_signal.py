"""Signal by depth against explicit Jacobians, theory and models at large."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from cases import network
from notebook import notebook
from torch import nn
from torch.nn import functional as F

from pathspace.diagnostics import report
from pathspace.diagnostics.parameters.gradients import gradients, imbalance
from pathspace.diagnostics.shared.selection import select
from pathspace.diagnostics.signal.meanfield import gains, gaussian_mean
from pathspace.diagnostics.signal.signal import signal
from pathspace.errors import InputError, InputTypeError


def functional() -> nn.Module:
    """Activations as functions, in place, and a sum in place."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        z = F.relu(net.first(x), inplace=True)
        y = net.second(z)
        y += z
        return net.third(torch.tanh(y))

    first, second, third = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
    return network(forward, first=first, second=second, third=third)


def test_one_vector_says_nothing_and_the_expectation_is_tr_k() -> None:
    # the ratio for one v lies anywhere between M times the extreme eigenvalues of K
    matrix = torch.randn(20, 20).double()
    k = matrix @ matrix.T / 20
    low, high = (float(20 * value) for value in torch.linalg.eigvalsh(k)[[0, -1]])
    ratios = []
    for _ in range(4000):
        v = torch.randn(20).double()
        ratios.append(float((v @ matrix).square().mean() / v.square().mean()))
        assert low <= ratios[-1] <= high
    assert max(ratios) > 1.3 * float(k.trace()) > 1.3 * 1.3 * min(ratios)
    layer = nn.Linear(20, 20, bias=False).double()
    layer.weight.data.copy_(matrix)
    found = signal(layer, torch.randn(1, 20).double(), probes=2000)[0].vjp_gain
    assert found is not None and found.agrees(float(k.trace())) and found.error < 0.02 * found.value


def test_functional_models_in_place() -> None:
    model, x = functional().double(), torch.randn(32, 5).double()
    rows = signal(model, x, probes=400)
    assert [row.layer for row in rows] == ["first", "second", "third"]
    for row, layer in zip(rows, (model.first, model.second, model.third), strict=True):
        weight = layer.weight.detach()
        assert row.vjp_gain is not None
        assert row.vjp_gain.agrees(float(weight.square().sum()) / weight.shape[1])
        assert row.weight_gain == pytest.approx(
            float(weight.square().sum() / weight.shape[0]) ** 0.5
        )
    assert rows["first"].forward_gain == pytest.approx(math.sqrt(2))
    assert rows["second"].backward_gain == pytest.approx(gains(torch.tanh).backward)
    # what was recorded is what the layers computed, although their outputs
    # were overwritten afterwards
    assert rows["first"].mean == pytest.approx(float(model.first(x).detach().mean()), rel=1e-12)


def test_dead_units_are_counted_wherever_the_activation_is() -> None:
    model = functional()
    nn.init.constant_(model.first.bias[2:5], -1e3)
    for parameter in model.second.parameters():
        nn.init.zeros_(parameter)
    rows = signal(model, torch.randn(64, 5))
    assert (rows["first"].dead, rows["second"].dead) == (3, 0)
    assert rows["first"].units == 7


def test_filters_and_refusals() -> None:
    model = functional()
    x = torch.randn(2, 5)
    assert [row.layer for row in signal(model, x, names=["first", "thi*"])] == ["first", "third"]
    assert [row.layer for row in signal(model, x, types="Linear", names="s*")] == ["second"]
    (row,) = signal(model.first, x, types=[nn.Linear])
    assert row.layer == "" and row.vjp_gain == signal(model.first, x)[0].vjp_gain
    assert list(select(nn.Sequential(nn.Sequential(nn.Tanh())), types=nn.Sequential)) == ["0"]
    with pytest.raises(InputError, match="its types are Linear, Network"):
        signal(model, x, types=nn.Conv2d)
    with pytest.raises(InputError, match="probes=0"):
        signal(model, x, probes=0)
    with pytest.raises(InputTypeError, match="found int"):
        select(3)  # type: ignore[arg-type]
    model.unused = nn.Linear(3, 3)
    assert "unused" in signal(model, x).notes[0]


def test_integer_inputs_and_repeated_calls() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(nn.Embedding(10, 6), shared, nn.ReLU(), shared)
    rows = signal(model, torch.randint(0, 10, (4, 3)))
    assert rows[0].vjp_gain is None and "integer" in rows[0].remark
    assert rows[0].output_gain is not None and rows[0].output_gain.value > 0
    assert [row.layer for row in rows] == ["0", "1", "2", "1 (2)"]


@pytest.mark.parametrize("mode", ["uniform", "normal"])
def test_initialisation_variances(mode: str) -> None:
    # section 2.6.1: a uniform weight in (-w, w) has variance w^2/3, a normal one w^2
    layer = nn.Linear(400, 4000, bias=False).double()
    if mode == "uniform":
        nn.init.uniform_(layer.weight, -math.sqrt(3 / 400), math.sqrt(3 / 400))
    else:
        nn.init.normal_(layer.weight, std=400**-0.5)
    row = signal(layer, torch.randn(64, 400).double(), probes=2, jvp=False)[0]
    assert row.variance == pytest.approx(1, abs=0.03)
    assert row.weight_gain == pytest.approx(1, abs=0.01)


def test_gaussian_integrals() -> None:
    for degree, value in ((0, 1), (2, 1), (4, 3), (6, 15)):
        assert gaussian_mean(lambda z, d=degree: z**d) == pytest.approx(value, rel=1e-9)
    assert gaussian_mean(lambda z: z**2, 4.0, 3.0) == pytest.approx(13, rel=1e-9)
    page = notebook("order_and_chaos")
    assert page.theory(torch.tanh, 1.3) == pytest.approx(0.0312, abs=5e-5)
    assert page.theory(torch.relu, 1.0) == pytest.approx(-math.log(2) / 2, rel=1e-9)
    assert page.theory(torch.tanh, 2.0) == pytest.approx(0.155, abs=5e-4)
    assert page.critical_scale(torch.tanh, 0.3) == pytest.approx(1.396, abs=1e-3)


@pytest.mark.parametrize("mean", [-1.93, -0.7254, 0.001, 1.3])
def test_gaussian_means_of_jumps_away_from_zero(mean: float) -> None:
    """Slopes of a ReLU behind a mean, and of a clipped function, where 320 nodes were 9 % off."""
    below = 0.5 * math.erfc(-mean / math.sqrt(2))
    assert gaussian_mean(lambda z: (z > 0).double(), 1.0, mean) == pytest.approx(below, abs=1e-3)
    for variance in (0.3, 9.0, 300.0):
        inside = math.erf(1 / math.sqrt(2 * variance))
        found = gaussian_mean(lambda z: (z.abs() < 1).double(), variance)
        assert found == pytest.approx(inside, abs=1e-3)


def test_imbalance_of_gradients_at_glorot_initialisation() -> None:
    # section 2.3.1, corrected: Var dW / Var dU = M Var[U] E[s'^2] E[x^2] / E[z^2], 0.21
    # here, neither 0.025 nor 0.074
    n, h, m = 50, 800, 10
    ratios, predicted = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(n, h), nn.Tanh(), nn.Linear(h, m)).double()
        for layer in (model[0], model[2]):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        x = torch.randn(256, n).double()
        direction = torch.randn(256, m).double()
        table = gradients(model, lambda y, d: (y * d).sum(), [(x, direction)])
        ratios.append((table["0.weight"].rms / table["2.weight"].rms) ** 2)
        z = model[1](model[0](x)).detach()
        slopes = (1 - z**2).square().mean()
        predicted.append(float(m * 2 / (m + h) * slopes * x.square().mean() / z.square().mean()))
    assert sum(ratios) / 3 == pytest.approx(sum(predicted) / 3, rel=0.15)
    assert sum(ratios) / 3 == pytest.approx(0.21, abs=0.04)


def test_parameters_without_gradient_are_named() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    found = gradients(model, lambda out, _: out.sum(), [(torch.ones(1, 2), None)])
    assert found.notes[0] == "No gradient reaches idle.bias, idle.weight." and len(found) == 2
    alone = gradients(model["used"], lambda out, _: out.sum(), [(torch.ones(1, 2), None)])
    assert alone.notes == ("Gradient noise needs at least two batches.",)


def test_gradients_beside_noise_weights_and_each_other() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    batches = [(torch.randn(8, 4).double(), torch.randn(8, 4).double()) for _ in range(5)]
    table = gradients(model, F.mse_loss, batches)
    middle = statistics.median(row.rms for row in table)
    for row in table:
        weight = model.get_parameter(row.parameter).detach()
        assert row.relative == pytest.approx(row.rms / float(weight.square().mean().sqrt()))
        # the mean of 5 batches has a fifth of the noise of one
        unbiased = row.rms**2 - row.noise / 5
        assert row.signal_to_noise == pytest.approx(max(unbiased, 0) / row.noise, rel=1e-9)
        assert row.spread == pytest.approx(row.rms / middle)
    assert any(row.signal_to_noise for row in table)
    assert imbalance(table) >= 1
    with pytest.raises(InputError, match="no batches"):
        gradients(model, F.mse_loss, [])


def test_outputs_that_differ_by_rounding_do_not_vary() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    errors = 2e-8 * torch.arange(5.0)[:, None]
    model[2].register_forward_hook(lambda _module, _args, output: output * (1 + errors))
    x = torch.randn(1, 16).repeat(5, 1)
    table = signal(model, x)
    assert table["2"].variance == 0 < table["0"].variance
    assert "1 layer has constant outputs" in report(model, x).sentences["variance"]
