"""Networks as somebody trained them: the right ones are loaded, and what the
library says about them is true.
"""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn
from zoo.subject import Subject, change
from zoo.trained import TRAINED, load, params
from zoo.trained_figures import parts_of, squares
from zoo.trained_page import DATA, PAGE, render

import pathspace as ps
from pathspace.pruning.compare import Comparison

# (networks of millions of weights)
pytestmark = pytest.mark.slow

# largest change of the outputs that a rescaling by a standard normal log-scale may make in float32
STANDS = 1e-4
# the same for other orders of channels, and for smaller models beside masked ones
SAME = 1e-5


@functools.cache
def subject_of(name: str, dtype: torch.dtype = torch.float32) -> Subject:
    """Traced once; tests change copies."""
    return Subject(name, dtype)


@pytest.mark.parametrize("name", params())
def test_loads_with_all_its_weights(name: str) -> None:
    model, _, _ = load(name)
    assert sum(p.numel() for p in model.parameters()) == TRAINED[name].weights
    assert not model.training


@torch.no_grad()
@pytest.mark.parametrize("name", params())
def test_rescaling_leaves_the_network_alone_as_it_stands(name: str) -> None:
    """In float32 with every `eps`, at the sizes of inputs that it may meet."""
    subject = subject_of(name)
    graph = subject.graph
    assert graph.num_exact_units == graph.num_units
    for seed in range(2):
        moved = subject.moved(seed)
        for size in (1.0, 0.01, 100.0) if seed == 0 else (1.0,):
            assert (
                change(subject.outputs(subject.model, size), subject.outputs(moved, size)) <= STANDS
            )


@torch.no_grad()
def compared_after_changes_of_channels(name: str, left: float) -> Comparison:
    """Half the channels left out equal half masked, with fewer weights; moved and
    rescaled ones are compared.
    """
    subject = subject_of(name)
    groups = ps.channels(subject.model, *subject.args, kwargs=subject.kwargs)
    small, large = groups.remove(keep=0.5), groups.masked(keep=0.5)
    assert sum(p.numel() for p in small.parameters()) < left * sum(
        p.numel() for p in subject.model.parameters()
    )
    assert change(subject.outputs(large), subject.outputs(small)) <= SAME
    moved = groups.permute({group.name: torch.randperm(len(group)) for group in groups})
    assert change(subject.outputs(subject.model), subject.outputs(moved)) <= SAME
    other = ps.rescale_(moved, subject.graph, torch.randn(subject.graph.num_units))
    found = ps.compare(subject.model, other, subject.graph)
    assert found.as_given > 0.1
    return found


LARGE = ("antiberty", "efficientnet-lite0")
SMALL = ("crepe-tiny", "mtcnn-pnet", "mtcnn-rnet", "mtcnn-onet", "silero-vad")


@pytest.mark.parametrize("name", params(*SMALL, *LARGE))
def test_channels_are_left_out_and_change_places_as_it_stands(name: str) -> None:
    found = compared_after_changes_of_channels(name, left=0.6 if name in LARGE else 0.8)
    if name not in LARGE:
        assert found.same
    # (running variances near 0 lose digits, as their eps does not scale)
    assert found.distance <= SAME and all("running_var" in tensor for tensor in found.differ)


@torch.no_grad()
@pytest.mark.parametrize("name", params("efficientnet-lite0"))
def test_norms_are_folded_and_bounds_lifted(name: str) -> None:
    subject = subject_of(name)
    wanted = subject.outputs(subject.model)
    folded = ps.fold_norms(subject.model, *subject.args)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    lifted = ps.lift_clips(folded, *subject.args)
    assert not any(isinstance(module, nn.ReLU6) for module in lifted.modules())
    for model in (folded, lifted, ps.lift_clips(subject.model, *subject.args)):
        assert change(wanted, subject.outputs(model)) <= SAME
    # bounds follow the scales of what they bound
    graph = ps.trace(lifted, *subject.args)
    ps.rescale_(lifted, graph, torch.randn(graph.num_units))
    assert change(wanted, subject.outputs(lifted)) <= SAME


PURPOSES = (
    ps.Balance(),
    ps.Range(4),
    ps.Noise(8),
    ps.Noise(8, "channel"),
    ps.ActivationRange(),
    ps.Smooth(),
    ps.Conditioning(),
)


@torch.no_grad()
@pytest.mark.parametrize("name", params("crepe-tiny", "mtcnn-pnet", "silero-vad"))
def test_a_gauge_for_any_purpose_is_the_same_network(name: str) -> None:
    subject = subject_of(name)
    wanted = subject.outputs(subject.model)
    for purpose in PURPOSES:
        # (path sensitivities without data are those of homogeneous networks)
        gauge = ps.choose_gauge(subject.model, subject.graph, purpose, subject.args, steps=5)
        found = gauge.certificate
        assert found.bound <= found.after <= found.before
        assert (
            change(wanted, subject.outputs(ps.rescale_(subject.copy(), subject.graph, gauge)))
            <= SAME
        ), purpose
    powers = ps.choose_gauge(subject.model, subject.graph, ps.Balance(), powers_of_two=True)
    moved = ps.rescale_(subject.copy(), subject.graph, powers)
    # (running variances are rounded, as their eps does not scale)
    exact = not any("running_var" in key for key in subject.model.state_dict())
    assert change(wanted, subject.outputs(moved)) <= (0.0 if exact else SAME)


@torch.no_grad()
@pytest.mark.parametrize("name", params("crepe-tiny", "mtcnn-pnet", "mtcnn-rnet"))
def test_rescaling_for_small_types_is_the_same_network(name: str) -> None:
    subject = subject_of(name)
    wanted = subject.outputs(subject.model)
    for bits, per in ((4, "tensor"), (8, "channel")):
        found = ps.equalise(subject.model, subject.graph, bits, per, subject.args, trials=4)
        assert found.after >= found.before and found.helped == bool(found.phi.any())
        assert change(wanted, subject.outputs(found.model)) <= SAME
    for model in (subject.model, subject.moved(0)):
        fitted = ps.fit_dtype(model, subject.args)
        assert change(subject.outputs(model), subject.outputs(fitted.model)) <= SAME
        assert fitted.fits and not fitted.error > 0.1


@torch.no_grad()
@pytest.mark.parametrize("name", params())
def test_rescaling_holds_for_other_numbers_of_samples(name: str) -> None:
    subject = subject_of(name)
    moved = subject.moved(0)
    dim = {"silero-vad": [0, 1]}.get(name, [0] * len(subject.args))
    for count in (1, 7):
        args = [
            torch.cat([arg, arg.flip(d) * 0.7, arg * 1.3, arg * 0.5], d).narrow(d, 0, count)
            for arg, d in zip(subject.args, dim, strict=True)
        ]
        before, after = (
            torch.cat([leaf.reshape(-1) for leaf in (out if isinstance(out, tuple) else (out,))])
            for out in (subject.model(*args), moved(*args))
        )
        assert change(before, after) <= STANDS


@pytest.mark.parametrize(
    "name", params("crepe-tiny", "mtcnn-pnet", "mtcnn-rnet", "mtcnn-onet", "silero-vad")
)
def test_theorems_hold_and_the_proof_is_accepted(name: str) -> None:
    subject = subject_of(name)
    found = ps.verify(subject.model, *subject.args, kwargs=subject.kwargs)
    assert found.holds and found.theorem3["holds"] and found.invariance["holds"]
    assert found.units_exact == found.units == subject.graph.num_exact_units
    verdict = ps.check(ps.proof(subject.graph.skeleton()), model=subject.model, args=subject.args)
    assert verdict.accepted and verdict.compared == "outputs"
    assert verdict.units == found.units and verdict.dimension == found.dimension


@torch.no_grad()
@pytest.mark.parametrize("name", params())
def test_balance_makes_weights_smaller_and_keeps_the_function(name: str) -> None:
    subject = subject_of(name, torch.float64)
    model = ps.balance_(subject.copy(), subject.graph)
    before, after = squares(subject.model, subject.graph), squares(model, subject.graph)
    assert change(subject.outputs(subject.model), subject.outputs(model)) <= 1e-9
    assert after <= before * (1 + 1e-12)
    if not len(ps.balancing(subject.model, subject.graph).kept):
        # no other network of the orbit is smaller: one that was moved away arrives at the same size
        again = ps.balance_(subject.moved(0), subject.graph)
        assert squares(again, subject.graph) == pytest.approx(after, rel=1e-9)


def test_committed_page_is_what_its_data_say() -> None:
    rows = json.loads(DATA.read_text())
    assert PAGE.read_text() == render(rows)
    assert len(rows) >= 8 and set(rows) <= set(TRAINED)
    for name, row in rows.items():
        assert set(row) == set(parts_of(name)), name
        assert not any("fault" in facts for facts in row.values()), name
        assert row["rescaling"]["float32"] <= STANDS, name
        assert row["certificate"]["units_exact"] == row["graph"]["exact_units"], name
