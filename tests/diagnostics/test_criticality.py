"""Order and chaos against theory: MLPs, residual nets, RNNs of torch and as loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pathspace.diagnostics.signal.criticality import (
    critical_point,
    exponent,
    growth_exponent,
    redraw,
    sweep,
)
from pathspace.diagnostics.signal.meanfield import critical_scale, growth
from pathspace.errors import InputError


def mlp(width: int, depth: int, act: type[nn.Module], bias: bool = False) -> nn.Sequential:
    return nn.Sequential(
        *[layer for _ in range(depth) for layer in (nn.Linear(width, width, bias=bias), act())]
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w, self.v = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        nn.init.normal_(self.v.weight, std=width**-0.5)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z + self.v(torch.relu(self.w(z)))


class Loop(nn.Module):
    """An RNN written as a loop, fed at every step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.hidden = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        for step in x:
            h = torch.tanh(self.into(step) + self.hidden(h))
        return h


def impulse(width: int, steps: int, batch: int = 2, size: float = 1.0) -> torch.Tensor:
    torch.manual_seed(7)
    x = torch.zeros(steps, batch, width)
    x[0] = size * torch.randn(batch, width)
    return x


@pytest.mark.slow
def test_relu_mlp_at_width_256() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 256)
    model = mlp(256, 40, nn.ReLU)
    found = critical_point(model, x, low=1.2, high=1.7, draws=4, directions=1, tolerance=2e-3)
    assert found.scale is not None and found.error is not None
    assert found.scale == pytest.approx(math.sqrt(2), rel=0.01)
    assert abs(found.scale - math.sqrt(2)) < 4 * found.error + 0.01 and found.error < 0.02
    assert "order below" in found.verdict
    # without biases the exponent is its value at 1 plus the log of the scale, for every draw
    low, high = found.points[0], found.points[len(found.points) - 1]
    assert high.growth.value - low.growth.value == pytest.approx(
        math.log(high.scale / low.scale), abs=1e-9
    )


@pytest.mark.slow
def test_tanh_mlp_at_width_256() -> None:
    torch.manual_seed(0)
    x = 1e-3 * torch.randn(4, 256)
    found = critical_point(
        mlp(256, 60, nn.Tanh), x, low=0.8, high=1.3, draws=3, directions=1, tolerance=4e-3
    )
    assert found.scale == pytest.approx(1, rel=0.02)


@pytest.mark.slow
def test_tanh_exponents_on_both_sides() -> None:
    torch.manual_seed(0)
    points = sweep(mlp(200, 50, nn.Tanh), [0.8, 2.0], torch.randn(4, 200), draws=3, directions=1)
    for point in points:
        assert point.growth.value == pytest.approx(growth(torch.tanh, point.scale), abs=0.02)
    assert points[0].high < 0 < points[1].low


@pytest.mark.slow
def test_biases_move_the_edge() -> None:
    torch.manual_seed(0)
    points = sweep(
        mlp(200, 40, nn.Tanh, bias=True),
        [1.1, 1.7],
        torch.randn(4, 200),
        biases=[0.3],
        draws=3,
        directions=1,
    )
    assert points[0].growth.value < 0 < points[1].growth.value
    assert 1.1 < critical_scale(torch.tanh, 0.3) < 1.7


@pytest.mark.slow
def test_residual_nets_have_no_ordered_phase() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block(128) for _ in range(24)]), torch.randn(4, 128)
    options = {"types": Block, "weights": "*.w.weight", "draws": 3, "directions": 1}
    found = critical_point(model, x, low=0.05, high=2.0, **options)
    assert found.scale is None and found.verdict.startswith("No ordered phase")
    for point in sweep(model, [0.3, 1.0], x, **options):
        assert point.growth.value == pytest.approx(math.log(1 + point.scale**2 / 2) / 2, rel=0.1)


def test_the_exponent_of_an_rnn_below_the_edge_is_its_spectral_radius() -> None:
    rnn = redraw(nn.RNN(120, 120, bias=False), 0.8, seed=1)
    found = growth_exponent(rnn, impulse(120, 400, size=1e-3), directions=2)
    radius = float(torch.linalg.eigvals(rnn.weight_hh_l0.detach()).abs().max())
    assert found.growth.value == pytest.approx(math.log(radius), abs=0.01)
    assert found.phase == "order" and found.steps == 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "edge", "slack"), [("tanh", 1.0, 0.06), ("relu", math.sqrt(2), 0.12)]
)
def test_critical_scales_of_rnns(kind: str, edge: float, slack: float) -> None:
    rnn = nn.RNN(128, 128, bias=False, nonlinearity=kind)  # type: ignore[arg-type]
    found = critical_point(
        rnn, impulse(128, 120, size=1e-6), low=0.7, high=2.2, draws=4, directions=1, tolerance=0.02
    )
    assert found.scale == pytest.approx(edge, abs=slack)


def test_loops_and_recurrent_layers_agree_and_inputs_suppress_chaos() -> None:
    width, steps = 100, 120
    loop = redraw(Loop(width), 1.3, names="hidden.weight", seed=2)
    rnn = nn.RNN(width, width, bias=False).double()
    rnn.weight_ih_l0.data.copy_(loop.into.weight.data)
    rnn.weight_hh_l0.data.copy_(loop.hidden.weight.data)
    torch.manual_seed(0)
    x = 2 * torch.randn(steps, 2, width)
    by_layer = growth_exponent(rnn, x, directions=1)
    # the loop's states are seen one step later, through the recurrent matrix
    by_loop = growth_exponent(loop, x, names="hidden", at=0, directions=1, burn_in=30)
    assert by_loop.growth.value == pytest.approx(by_layer.growth.value, abs=0.01)
    quiet = growth_exponent(rnn, impulse(width, steps), directions=1)
    assert by_layer.growth.value < quiet.growth.value - 0.05
    assert by_layer.phase == "order"


def test_explicit_products_of_jacobians() -> None:
    torch.manual_seed(0)
    model, x = mlp(12, 6, nn.Tanh).double().requires_grad_(False), torch.randn(1, 12).double()
    found = growth_exponent(model, x, directions=1, burn_in=0, types=nn.Linear, seed=3)
    u = torch.randn(1, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logs, z = [], x
    for linear, act in zip(model[::2], model[1::2], strict=True):
        z, u = linear(z), linear(u)
        logs.append(float(u.square().mean().sqrt().log()))
        u = u * (1 - torch.tanh(z) ** 2)
        z = act(z)
    assert found.profile == pytest.approx(logs, rel=1e-12)
    assert found.growth.value == pytest.approx((logs[-1] - logs[0]) / 5, rel=1e-12)


def test_integer_inputs_start_at_the_embedding() -> None:
    torch.manual_seed(0)
    table, net = nn.Embedding(9, 16), mlp(16, 8, nn.Tanh)
    tokens = torch.randint(0, 9, (5, 3))
    whole = growth_exponent(
        nn.Sequential(table, *net), tokens, start="0", types=nn.Linear, directions=1, seed=2
    )
    part = growth_exponent(net, table(tokens).detach(), types=nn.Linear, directions=1, seed=2)
    assert whole.profile == pytest.approx(part.profile, rel=1e-12)
    with pytest.raises(InputError, match="no layer 'x'"):
        growth_exponent(net, torch.randn(1, 16), start="x")


def test_dead_perturbations_and_refusals() -> None:
    logs = torch.tensor([[0.0, 0.0], [1.0, -math.inf], [2.0, -math.inf]])
    found = exponent(logs, 0)
    assert found.died == 1 and found.growth.value == 1.0 and found.phase == "undecided"
    assert exponent(torch.full((3, 2), -math.inf)).growth.value == -math.inf
    with pytest.raises(InputError, match="at least two places"):
        growth_exponent(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(InputError, match="no linear"):
        growth_exponent(nn.ReLU(), torch.randn(2, 3))
    with pytest.raises(InputError, match="floating-point input"):
        growth_exponent(
            nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)),
            torch.tensor([1, 2]),
        )
    with pytest.raises(InputError, match="low < high"):
        critical_point(mlp(3, 3, nn.ReLU), torch.randn(1, 3), low=2, high=1)
    with pytest.raises(InputError, match="redraw"):
        redraw(nn.ReLU(), 1.0)


def test_weights_without_size_let_every_perturbation_vanish() -> None:
    assert growth(torch.relu, 0.0) == -math.inf
