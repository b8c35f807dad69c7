"""Order and chaos against theory: MLPs, residual nets, RNNs of torch and as loops."""

from __future__ import annotations

import math
from typing import Any

import cases
import pytest
import torch
from notebook import notebook
from torch import nn

page = notebook("order_and_chaos")


def mlp(width: int, depth: int, act: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*cases.mlp(*[width] * (depth + 1), bias=False, act=act), act())


def block(width: int) -> nn.Module:
    w, v = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
    nn.init.normal_(v.weight, std=width**-0.5)
    return cases.network(lambda net, z: z + net.v(torch.relu(net.w(z))), w=w, v=v)


def loop(width: int) -> nn.Module:
    """An RNN written as a loop, fed at every step."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        for step in x:
            h = torch.tanh(net.into(step) + net.hidden(h))
        return h

    into, hidden = (nn.Linear(width, width, bias=False) for _ in range(2))
    return cases.network(forward, into=into, hidden=hidden)


def impulse(width: int, steps: int, size: float = 1.0) -> torch.Tensor:
    torch.manual_seed(7)
    x = torch.zeros(steps, 2, width)
    x[0] = size * torch.randn(2, width)
    return x


@pytest.mark.slow
def test_relu_mlp_at_width_256() -> None:
    x, edge = torch.randn(4, 256), math.sqrt(2)
    found = page.critical_point(mlp(256, 50, nn.ReLU), x, 1.2, 1.7, draws=3, directions=1)
    assert found.value == pytest.approx(edge, rel=0.02)
    assert abs(found.value - edge) < 4 * found.error + 0.01 and found.error < 0.02


@pytest.mark.slow
def test_residual_nets_have_no_ordered_phase() -> None:
    model, x = nn.Sequential(*[block(128) for _ in range(24)]), torch.randn(4, 128)

    def exponent(scale: float, seed: int) -> float:
        twin = page.redraw(model, scale, pattern="*.w.weight", seed=seed)
        return page.growth_exponent(twin, x, layers=list(twin), directions=1).value

    for scale in (0.05, 0.3, 1.0, 2.0):
        found = sum(exponent(scale, seed) for seed in range(3)) / 3
        assert found > 0
        assert found == pytest.approx(math.log(1 + scale**2 / 2) / 2, rel=0.1, abs=2e-3)


def test_the_exponent_of_an_rnn_below_the_edge_is_its_spectral_radius() -> None:
    rnn = page.redraw(nn.RNN(120, 120, bias=False), 0.8, pattern="weight_hh*", seed=1)
    found = page.growth_exponent(rnn, impulse(120, 400, size=1e-3), at=0, directions=2)
    radius = float(torch.linalg.eigvals(rnn.weight_hh_l0.detach()).abs().max())
    assert found.value == pytest.approx(math.log(radius), abs=0.01)
    assert found.interval()[1] < 0


def test_loops_and_recurrent_layers_agree_and_inputs_suppress_chaos() -> None:
    width, steps = 100, 120
    net = page.redraw(loop(width), 1.3, pattern="hidden.weight", seed=2)
    rnn = nn.RNN(width, width, bias=False).double()
    rnn.weight_ih_l0.data.copy_(net.into.weight.data)
    rnn.weight_hh_l0.data.copy_(net.hidden.weight.data)
    torch.manual_seed(0)
    x = 2 * torch.randn(steps, 2, width)
    by_layer = page.growth_exponent(rnn, x, at=0, directions=1)
    # the loop's states are seen one step later, through the recurrent matrix
    by_loop = page.growth_exponent(net, x, layers=[net.hidden], at=0, directions=1, burn_in=30)
    assert by_loop.value == pytest.approx(by_layer.value, abs=0.01)
    quiet = page.growth_exponent(rnn, impulse(width, steps), at=0, directions=1)
    assert by_layer.value < quiet.value - 0.05 and by_layer.interval()[1] < 0


def test_explicit_products_of_jacobians() -> None:
    model, x = mlp(12, 6, nn.Tanh).double().requires_grad_(False), torch.randn(1, 12).double()
    found = page.perturbed(model, x, directions=1, seed=3)
    u = torch.randn(1, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logs, z = [], x
    for linear, act in zip(model[::2], model[1::2], strict=True):
        z, u = linear(z), linear(u)
        logs.append(float(u.square().mean().sqrt().log()))
        u = u * (1 - torch.tanh(z) ** 2)
        z = act(z)
    assert found.flatten().tolist() == pytest.approx(logs, rel=1e-12)
    exponent = page.growth_exponent(model, x, directions=1, burn_in=0, seed=3)
    assert exponent.value == pytest.approx((logs[-1] - logs[0]) / 5, rel=1e-12)
