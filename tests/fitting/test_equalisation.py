"""Models that are rescaled before they are rounded or squeezed: the same function,
never worse than as trained.
"""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from benchmarks import equalise as benchmark
from benchmarks import figures
from torch import Tensor, nn

import pathspace as ps
from pathspace.fitting.activation_statistics import activation_sizes
from pathspace.fitting.calibration import Calibrated
from pathspace.fitting.equalisation import Rounded
from pathspace.fitting.quantise import quantised, quantised_weights, weight_axes


def network(seed: int, scramble: float) -> tuple[nn.Module, ps.ReductionGraph]:
    """A small convolutional network with norms and clips, folded and lifted,
    and scrambled by its gauge.
    """
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(),
        nn.Conv2d(8, 12, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip
    x = torch.ones(1, 3, 10, 10)
    model = ps.lift_clips(ps.fold_norms(layers.eval(), x), x)
    graph = ps.trace(model, x)
    return ps.rescale_(model, graph, scramble * torch.randn(graph.num_units)), graph


def decibels(model: nn.Module, other: nn.Module, bits: int, per: str, x: Tensor) -> float:
    """Signal over noise of a copy with rounded weights."""
    net = copy.deepcopy(other)
    tensors = quantised_weights(dict(net.named_parameters()), weight_axes(net), bits, per)
    net.load_state_dict({**net.state_dict(), **tensors})
    with torch.no_grad():
        wanted = model(x)
        return float(10 * (wanted.square().sum() / (net(x) - wanted).square().sum()).log10())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "per"), [(4, "tensor"), (4, "channel"), (6, "tensor"), (8, "tensor")]
)
def test_never_worse_than_as_trained_on_other_data(bits: int, per: str) -> None:
    for seed, scramble in ((0, 1.0), (1, 0.0))[: 2 if bits == 8 else 1]:
        model, graph = network(seed, scramble)
        keys = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        generator = torch.Generator().manual_seed(seed)
        x, held = (torch.randn(count, 3, 10, 10, generator=generator) for count in (24, 64))
        found = ps.equalise(model, graph, bits, per, x)
        with torch.no_grad():
            torch.testing.assert_close(found.model(held), model(held), rtol=1e-5, atol=1e-5)
        before, after = (decibels(model, net, bits, per, held) for net in (model, found.model))
        assert after >= before and found.after >= found.before
        assert found.helped or after == before
        assert all(torch.equal(tensor, keys[key]) for key, tensor in model.state_dict().items())
        if scramble and per == "tensor" and bits > 4:
            assert after > before + 6
        assert found.before == pytest.approx(decibels(model, model, bits, per, x), abs=1e-2)
        assert ("no gauge is safely better" in str(found)) != found.helped


@pytest.mark.slow
def test_the_search_draws_other_rounding_errors_and_keeps_the_better_ones() -> None:
    model, graph = network(2, 0.0)
    x, held = (
        torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(count))
        for count in (30, 96)
    )
    rounded = Rounded(model, graph, 5, "tensor")
    phi = 0.1 * torch.randn(graph.num_units, dtype=torch.float64)
    net = ps.rescale_(copy.deepcopy(model), graph, phi)
    wanted = net.state_dict() | quantised_weights(
        dict(net.named_parameters()), weight_axes(net), 5, "tensor"
    )
    for name, tensor in rounded.at(phi).items():
        torch.testing.assert_close(tensor, wanted[name])
    stay, whole = (ps.equalise(model, graph, 5, "tensor", x, trials=trials) for trials in (0, 60))
    assert whole.after >= stay.after
    assert decibels(model, whole.model, 5, "tensor", held) >= decibels(
        model, model, 5, "tensor", held
    )


@torch.no_grad()
def test_running_variances_keep_their_digits_and_fit_the_type() -> None:
    model, x = (
        nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6, eps=1e-3), nn.Linear(6, 3)
        ).eval(),
        torch.randn(64, 4),
    )
    with torch.no_grad():
        model[2].running_var.copy_(torch.logspace(-2, 5.5, 6))
    graph = ps.trace(model, x)
    gauge = ps.choose_gauge(model, graph, lambda phi: phi.sum())
    moved = ps.rescale_(copy.deepcopy(model), graph, gauge)
    torch.testing.assert_close(
        moved(x), model(x), rtol=1e-5, atol=1e-5 * float(model(x).abs().max())
    )
    assert float(gauge[:6].min()) > -math.log(2.0**16)
    fitted = ps.fit_dtype(model, x)
    rows = {row.name: row for row in fitted.table}
    assert (
        fitted.fits
        and not fitted.fitted_before
        and 4 * rows["2.running_var"].largest_after <= 65504
    )
    # (copies of running statistics are no activations)
    assert all(row.largest_before < 1e5 for row in fitted.table if row.kind == "fixed scales")


def test_what_is_rounded_to() -> None:
    weight = torch.randn(3, 4, 2)
    for axis in (None, 0, 1):
        rounded = quantised(weight, 4, axis)
        groups = [None] if axis is None else range(weight.shape[axis])
        for group in groups:
            old, new = (w if group is None else w.select(axis, group) for w in (weight, rounded))
            step = float(old.abs().max()) / 7
            torch.testing.assert_close(new / step, (old / step).round(), rtol=0, atol=1e-4)
    assert torch.equal(quantised(torch.zeros(2, 2), 8, 0), torch.zeros(2, 2))


def test_models_out_of_range_are_brought_into_it() -> None:
    dtype = torch.float16
    model = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    x = torch.randn(32, 6)
    graph = ps.trace(model, x)
    far = ps.rescale_(model, graph, torch.linspace(-14, 14, graph.num_units))
    with torch.no_grad():
        assert not torch.isfinite(copy.deepcopy(far).half()(x.half())).all()
        fitted = ps.fit_dtype(far, x, dtype)
        torch.testing.assert_close(fitted.model(x), far(x), rtol=1e-5, atol=1e-5)
        assert fitted.fits and not fitted.fitted_before and fitted.error < 0.05
        small = copy.deepcopy(fitted.model).to(dtype)(x.to(dtype)).float()
        assert float((small - far(x)).abs().max() / far(x).abs().max()) < 0.05
    names = {row.name for row in fitted.table}
    assert {"0", "2", "0.weight", "4.bias"} <= names
    for row in fitted.table:
        assert 4 * row.largest_after <= torch.finfo(dtype).max


def test_models_within_range_stay_as_they_are() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(9, 6)
    fitted = ps.fit_dtype(model, [x, x])
    assert (
        fitted.fits
        and fitted.fitted_before
        and not bool(fitted.phi.any())
        and fitted.error == fitted.error_before
    )
    for old, new in zip(model.parameters(), fitted.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_fixed_scales_that_do_not_fit_are_told() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), 1e4 * torch.randn(9, 6)
    fitted = ps.fit_dtype(model, x)
    fixed = next(row for row in fitted.table if row.kind == "fixed scales")
    assert not fitted.fits and fixed.largest_after == fixed.largest_before
    with pytest.raises(ps.InputError, match="expected a floating point type"):
        ps.fit_dtype(model, x, torch.int8)


def test_the_page_shows_the_figures_and_they_are_as_good_as_it_says() -> None:
    held = figures.load(benchmark.NAME)
    assert figures.shows(benchmark.PAGE, benchmark.NAME, benchmark.table(held))
    for own, other in zip(held["lite0"], held["aimet"], strict=True):
        assert (own["bits"], own["per"]) == (other["bits"], other["per"])
        assert own["chosen gauge"] >= own["as trained"] and own["change"] < 1e-5
        if (own["bits"], own["per"]) == (8, "tensor"):
            assert own["chosen gauge"] > 3 + max(
                other["AIMET as it is"], other["AIMET ReLU"], own["layer by layer"]
            )
    for row in (*held["crepe"], *held["antiberty"]):
        assert (
            row["chosen gauge: right"] >= row["float"] - 0.01
            and row["chosen gauge"] >= row["as trained"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("size", [1.0, 1e10])
@pytest.mark.parametrize("shift", [-25.0, 12.0, 25.0])
def test_copies_far_outside_of_a_type_come_to_the_same_network(size, shift):
    """Unless outputs, which no gauge moves, are outside of its range: then nothing moves."""
    model, x = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double(),
        torch.randn(64, 4),
    )
    graph, x = ps.trace(model, x[:1].double()), x.double()
    with torch.no_grad():
        for tensor in model[2].parameters():
            tensor.mul_(size)
    found = []
    for start in (11.5, shift):
        other = ps.rescale_(copy.deepcopy(model), graph, torch.full((8,), start).double())
        fitted = ps.fit_dtype(other, x)
        assert fitted.fits == (size == 1) == bool(fitted.phi.any())
        found.append(fitted.model[0].weight.abs().max())
    # (scales are powers of two)
    assert size != 1 or 0.49 < found[1] / found[0] < 2.05


def test_models_without_units_and_types_that_compute_nothing():
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    gauge = ps.choose_gauge(model, ps.trace(model, x), ps.ActivationRange(), calibration=x)
    assert gauge.certificate.gap == 0
    fitted = ps.fit_dtype(model, x, torch.float8_e4m3fn)
    assert fitted.fits and math.isnan(fitted.error)


@pytest.mark.slow
def test_batches_may_be_cut_anywhere() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(10, 4) * torch.logspace(-1, 1, 10)[:, None]
    graph = ps.trace(model, x)
    tensors = Rounded(model, graph, 4, "tensor").at(torch.zeros(graph.num_units).double())
    own = dict(model.named_parameters())
    slopes = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(own)
    with torch.no_grad():
        energy = model(x).square().sum()
        changed = torch.func.functional_call(model, tensors, (x,)) - model(x)
    cuts = [[x], [x[:8], x[8:]], [x[9:], x[:9], x[:0]], [x, x]]
    for batches in cuts:
        held = Calibrated(model, batches)
        noise = held.noise(tensors)
        assert len(noise) == sum(map(len, batches))
        assert float(noise.mean()) == pytest.approx(
            float(changed.square().sum() / energy), rel=1e-5
        )
        felt = held.sensitivity(draws=1500)
        for name, slope in slopes.items():
            exact = float(slope.detach().square().sum() / energy)
            assert float(felt[name].sum()) == pytest.approx(exact, rel=0.1), (name, len(batches))


def test_calibration_without_a_sample_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(ps.InputError, match="holds no sample in 2 batches, expected one at least"):
        Calibrated(model, [torch.zeros(0, 4)] * 2)
    x = torch.randn(5, 4)
    found = [ps.fit_dtype(model, batches).error for batches in (x, [x[:0], x])]
    assert found[0] == found[1]


def test_random_numbers_are_drawn_alike_and_the_generator_stays() -> None:
    x = torch.randn(20, 4)

    class Skipping(nn.Module):
        """Drops features, and leaves out a layer, by three generators."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.dropout(self.a(x).relu(), 0.5, self.training)
            keep = torch.from_numpy(np.random.rand(16) < 0.7).to(x) * (random.random() + 0.5)
            return self.c(x * keep + self.b(x).relu())

    model = Skipping().train()
    graph = ps.trace(model, x)
    sizes = activation_sizes(graph, Calibrated(model, x))
    assert set(range(1, graph.num_units + 1)) <= set(np.abs(sizes.ids).tolist())
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    held = Calibrated(model, x)
    assert float(held.noise({}).max()) == 0
    fitted = ps.fit_dtype(model, x)
    assert fitted.error < 0.01 and fitted.error_before < 0.01
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()


def test_inputs_by_name_are_made_up_in_any_order() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.e = nn.Linear(4, 6), nn.Linear(6, 3), nn.Embedding(9, 4)

        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return self.b(self.a(x + self.e(i)).relu())

    model = Named()
    graph = ps.trace(model, kwargs={"i": torch.tensor([1, 2]), "x": torch.randn(2, 4)})
    with pytest.warns(UserWarning, match="makes up random ones"):
        found = ps.equalise(model, graph, 4, trials=3)
    assert found.made_up and "on random inputs" in str(found)
