"""Gauges chosen for an objective: minima that obvious formulas confirm, the same
from every rescaled copy.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.fitting.activation_statistics import activation_sizes
from pathspace.fitting.calibration import Calibrated
from pathspace.paths.norms import path_sensitivity


class Branches(nn.Module):
    """Grouped and strided convolutions, a residual connection, a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv1d(2, 6, 3), nn.Conv1d(6, 6, 3, groups=3, padding=1)
        self.one, self.two, self.last = (
            nn.Linear(6, 5),
            nn.Linear(6, 5, bias=False),
            nn.Linear(5, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = (x + torch.relu(self.deep(x))).mean(2)
        return self.last(torch.relu(self.one(x)) * self.two(x))


def subject(name: str) -> tuple[nn.Module, ps.ReductionGraph, Tensor]:
    """A model scrambled by its gauge, its graph, and a batch."""
    model, graph, batch = traced(name)
    return copy.deepcopy(model), graph, batch


@functools.cache
def traced(name: str) -> tuple[nn.Module, ps.ReductionGraph, Tensor]:
    """The same, once for all tests."""
    torch.manual_seed(3)
    if name == "mlp":
        model, x = (
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
            (32, 4),
        )
    else:
        model, x = Branches(), (16, 2, 9)
    model, batch = model.double().eval(), torch.randn(x).double()
    graph = ps.trace(model, batch[:2])
    return ps.rescale_(model, graph, torch.randn(graph.num_units)), graph, batch


OBJECTIVES = {
    "balance": ps.Balance(),
    "balance 1": ps.Balance(1.0),
    "noise": ps.Noise(4),
    "noise per channel": ps.Noise(4, "channel"),
    "range": ps.Range(4),
    "range per channel": ps.Range(4, "channel"),
    "activations": ps.ActivationRange(),
    "smooth": ps.Smooth(0.4),
    "conditioning": ps.Conditioning(),
}
PAIRS = [("mlp", key) for key in OBJECTIVES] + [
    ("branches", key) for key in ("noise", "activations", "smooth")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), PAIRS)
def test_minima_are_minima_and_the_same_from_every_copy(name: str, key: str) -> None:
    model, graph, x = subject(name)
    objective = OBJECTIVES[key]
    # (path sensitivities are those of homogeneous networks without data)
    batch = None if key == "conditioning" else x
    gauge = ps.choose_gauge(model, graph, objective, batch)
    found = gauge.certificate
    assert found.bound <= found.after <= found.before and found.gap < 5e-3 * max(
        1.0, abs(found.after)
    )
    moved = ps.rescale_(copy.deepcopy(model), graph, gauge)
    torch.testing.assert_close(moved(x), model(x))
    again = ps.choose_gauge(moved, graph, objective, batch).certificate
    # sizes that are measured change with the gauge as sizes do: SmoothQuant
    # starts from where it stands
    assert again.before == pytest.approx(found.after, abs=1e-6)
    assert again.after == pytest.approx(found.after, abs=2 * (found.gap + again.gap) + 1e-6)
    for seed in range(5):
        step = 0.3 * torch.randn(graph.num_units, generator=torch.Generator().manual_seed(seed))
        other = ps.rescale_(copy.deepcopy(moved), graph, step)
        assert (
            ps.choose_gauge(other, graph, objective, batch, tolerance=math.inf).certificate.before
            >= found.bound
        )


def test_a_gauge_is_a_tensor_with_a_certificate() -> None:
    model, graph, _ = subject("mlp")
    gauge = ps.choose_gauge(model, graph, ps.Range(4))
    assert isinstance(gauge, torch.Tensor) and gauge.shape == (graph.num_units,)
    assert type(2 * gauge) is type(gauge.phi) is torch.Tensor
    assert "Range(bits=4, per='tensor')" in str(gauge.certificate)
    assert graph.gauge(gauge).keys() == graph.gauge(gauge.phi).keys()


@pytest.mark.parametrize("key", ["noise", "balance", "range"])
def test_powers_of_two_change_nothing_at_all(key: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)), torch.randn(8, 4)
    graph = ps.trace(model, x)
    before = model(x)
    gauge = ps.choose_gauge(model, graph, OBJECTIVES[key], x, powers_of_two=True)
    exponents = gauge.phi / math.log(2)
    assert (
        float((exponents - exponents.round()).abs().max()) < 1e-12
        and gauge.certificate.powers_of_two
    )
    assert torch.equal(ps.rescale_(model, graph, gauge)(x), before)


def slow_noise(model: nn.Module, felt: dict[str, Tensor], bits: int, per: str) -> float:
    """One weight after the other."""
    total = 0.0
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        for place in itertools.product(*map(range, weight.shape)):
            group = weight if per == "tensor" else weight[place[0]]
            step = float(group.detach().abs().max()) / (2 ** (bits - 1) - 1)
            total += step**2 / 12 * float(felt[name][place])
    return total


@pytest.mark.slow
@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("name", ["mlp", "branches"])
def test_noise_is_what_its_formula_says(name: str, per: str) -> None:
    model, graph, x = subject(name)
    felt = Calibrated(model, x).sensitivity(4)
    certificate = ps.choose_gauge(model, graph, ps.Noise(5, per), x).certificate
    assert certificate.before == pytest.approx(math.log(slow_noise(model, felt, 5, per)), abs=1e-6)
    chosen = ps.rescale_(model, graph, ps.choose_gauge(model, graph, ps.Noise(5, per), x))
    measured = ps.choose_gauge(chosen, graph, ps.Noise(5, per), x).certificate.before
    assert measured == pytest.approx(certificate.after, abs=1e-6)


def test_sensitivity_is_the_square_of_the_jacobian() -> None:
    model, _, x = subject("mlp")
    felt = Calibrated(model, x[:6]).sensitivity(400)
    weight = model[2].weight
    slow = torch.zeros_like(weight)
    for out in model(x[:6]).reshape(-1):
        slow += torch.autograd.grad(out, weight, retain_graph=True)[0].square()
    slow /= model(x[:6]).square().sum().detach()
    torch.testing.assert_close(felt["2.weight"].sum(), slow.sum(), rtol=0.1, atol=0)
    torch.testing.assert_close(felt["2.weight"], slow, rtol=0.6, atol=0.02 * float(slow.max()))


def test_path_sensitivity_counts_the_paths() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)
    ).double()
    with torch.no_grad():
        model[2].bias[1] = 0
    graph = ps.trace(model, torch.randn(1, 2).double())
    weights = graph.weights()
    slow = torch.zeros_like(weights)
    for path in graph.paths():
        vector = torch.from_numpy(np.asarray(path.counting_vector).astype(np.int64))
        for edge in vector.nonzero().reshape(-1).tolist():
            others = vector.clone()
            others[edge] -= 1
            slow[edge] += (weights**others).prod() ** 2
    found = path_sensitivity(graph)
    joined = torch.cat([found[block.name].reshape(-1) for block in graph.blocks])
    torch.testing.assert_close(joined, slow / slow.max())


def test_paths_through_quotients_of_weights_are_refused() -> None:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(6, 3)).double().eval()
    graph = ps.trace(model, torch.randn(2, 4).double())
    with pytest.raises(ps.UnsupportedError, match="weights that are computed from"):
        path_sensitivity(graph)


def test_conditioning_makes_kernel_entries_alike() -> None:
    model, graph, _ = subject("mlp")

    def divergence(net: nn.Module) -> float:
        entries = torch.cat(
            [g.reshape(-1) for g in path_sensitivity(graph, dict(net.named_parameters())).values()]
        )
        return float(entries.sum().log() - entries.log().mean())

    gauge = ps.choose_gauge(model, graph, ps.Conditioning())
    assert divergence(model) == pytest.approx(gauge.certificate.before)
    assert divergence(ps.rescale_(model, graph, gauge)) == pytest.approx(gauge.certificate.after)


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8])
def test_smooth_is_smoothquant_where_that_applies(alpha: float) -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    nn.init.uniform_(model[0].weight, 0.1, 9)
    x = torch.randn(32, 6).double()
    graph = ps.trace(model, x)
    gauge = ps.choose_gauge(model, graph, ps.Smooth(alpha), x, tolerance=1e-9)
    largest, weights = model[0](x).abs().amax(0), model[1].weight.abs().amax(0)
    factor = largest**alpha / weights ** (1 - alpha)
    units = next(block for block in graph.blocks if block.name == "0.weight").head.reshape(-1) - 1
    torch.testing.assert_close(gauge.phi[units].exp(), (1 / factor).detach(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["mlp", "branches"])
def test_sizes_of_activations_belong_to_their_units(name: str) -> None:
    model, graph, x = subject(name)
    sizes = activation_sizes(graph, Calibrated(model, x))
    layer = model[0] if name == "mlp" else model.stem
    values = layer(x).detach()
    values = values.transpose(0, 1).reshape(values.shape[1], -1).abs().amax(1)
    head = (
        next(block for block in graph.blocks if block.name.endswith("weight"))
        .head.reshape(-1)
        .tolist()
    )
    for unit, value in zip(head, values.tolist(), strict=True):
        place = int(np.flatnonzero(sizes.ids == unit)[0])
        if name == "mlp":
            assert sizes.largest[place] == pytest.approx(value)
        # (the sum of the residual connection is larger, and has the same scale)
        assert sizes.largest[place] >= value - 1e-9
    phi = torch.randn(graph.num_units, dtype=torch.float64)
    moved = activation_sizes(graph, Calibrated(ps.rescale_(model, graph, phi), x))
    units = (sizes.ids > 0) & (sizes.ids <= graph.num_units)
    factor = phi.exp().numpy()[sizes.ids[units] - 1]
    assert (moved.ids == sizes.ids).all()
    np.testing.assert_allclose(moved.largest[units], factor * sizes.largest[units])
    np.testing.assert_allclose(moved.rms[units], factor * sizes.rms[units])


def test_functions_of_ones_own() -> None:
    model, graph, _ = subject("mlp")
    goal = torch.linspace(-1, 1, graph.num_units, dtype=torch.float64)

    def distance(phi: Tensor) -> Tensor:
        return (phi - goal).square().sum()

    gauge = ps.choose_gauge(model, graph, distance)
    torch.testing.assert_close(gauge.phi, goal, rtol=0, atol=1e-5)
    assert gauge.certificate.objective == "distance" and gauge.certificate.gap < 1e-3
    wavy = ps.choose_gauge(
        model, graph, lambda phi: (5 * phi).sin().sum() + 0.1 * phi.square().sum()
    )
    assert wavy.certificate.bound == -math.inf
    limited = ps.choose_gauge(model, graph, lambda phi: phi[0], limit=4.0)
    assert float(limited.phi[0].exp()) == pytest.approx(0.25) and limited.certificate.at_limit == 1


def test_units_that_are_free_without_eps_alone_stay() -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double(),
        torch.randn(9, 4).double(),
    )
    graph = ps.trace(model, x)
    assert graph.num_exact_units < graph.num_units
    gauge = ps.choose_gauge(model, graph, ps.Noise(4), x)
    assert torch.equal(gauge.phi, graph.exact_part(gauge.phi)) and bool(gauge.phi.any())
    every = ps.choose_gauge(model, graph, ps.Noise(4), x, exact=False)
    assert every.certificate.after <= gauge.certificate.after + 1e-3


@pytest.mark.parametrize(
    ("objective", "batch", "match"),
    [
        ("noise", None, "objective of type str"),
        (ps.Noise(1), None, "bits is 1, expected a whole number from 2 to 16"),
        (ps.Noise(8, "row"), None, "per is 'row', expected 'tensor' or 'channel'"),
        (ps.Smooth(1.0), None, r"alpha=1\.0, expected a number between 0 and 1"),
        (ps.ActivationRange(torch.int8), None, "expected a floating point type"),
        (ps.ActivationRange(headroom=0.5), None, r"headroom=0\.5"),
        (ps.Noise(8), [], "holds no sample in 0 batches"),
        (ps.Noise(8), 3, "calibration is of type int"),
        (ps.Noise(8), torch.randn(3, 7), "mat1 and mat2 must have the same dtype"),
        (lambda phi: phi, None, "no single number"),
    ],
)
def test_bad_input_is_told_in_a_sentence(objective: object, batch: object, match: str) -> None:
    model, graph, _ = subject("mlp")
    with pytest.raises(ps.PathspaceError, match=match):
        ps.choose_gauge(model, graph, objective, batch)
