"""Models that people use: answered, sound, as many units as counted by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from zoo.entry import Entry, load
from zoo.page import DATA, PAGE, ROUNDED, SOUND, render
from zoo.soundness import rescaled, scaling_dimension, spread, trace_double, unbalanced

import pathspace as ps
from pathspace.evidence.explain import account

pytestmark = pytest.mark.usefixtures("no_rule_fails")

FAST = [entry for entry in load().values() if entry.fast]
SLOW = (
    "hf_deberta_v2 hf_gpt2 decoder_qk_norm_softcap swin_small swin_v2_small dlrm hf_t5 resnet18"
    " shufflenet_v2_x1_0 decoder_reglu decoder_shared_depth"
).split()


def parameters(entries: list[Entry]) -> list[Any]:
    marks = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(entry, mode, id=f"{entry.name}-{mode}", marks=marks[entry.name in SLOW])
        for entry in entries
        for mode in entry.modes
    ]


# relative; sums of gradients lose a few digits more than outputs do
OUTPUTS, BALANCE = 1e-8, 1e-7
LARGE = 1_000_000
# the numerical count takes one derivative per scalar and more
TOO_LARGE = ("pointnet", "nerf")
SMALL = [
    entry
    for entry in FAST
    if entry.family in ("assorted", "activation") and entry.name not in TOO_LARGE
]
# symmetries of 8 features that the numerical count finds and the library does not give
UNTOLD = {
    # (weight, running variance) -> (c weight, c^2 variance), which training undoes
    "batchnorm_mlp-eval",
    # derivatives do not see that the jump at 0.1 stays where it is
    "act_threshold_moved-train",
    "act_threshold_moved-eval",
    # exp(log|x|) is homogeneous, each of the two is not
    "act_logit_scale-train",
    "act_logit_scale-eval",
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("entry", "mode"), parameters(FAST))
def test_answers_are_sound_and_complete(entry: Entry, mode: str) -> None:
    model, args, kwargs = entry.make(mode)
    scalars = sum(parameter.numel() for parameter in model.parameters())
    assert entry.weights in (None, scalars)
    if scalars > LARGE:
        graph = ps.trace(model, *args, kwargs=kwargs)
    else:
        graph, runner = trace_double(spread(model), args, kwargs)
        assert rescaled(graph, runner) <= OUTPUTS
        assert unbalanced(graph, runner) <= BALANCE
    assert entry.units.get(mode, graph.num_units) == graph.num_units
    explanation = account(graph)
    assert sum(explanation.totals.values()) == scalars
    assert {row.name for row in explanation.parameters} == {
        name for name, _ in model.named_parameters()
    }


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("entry", "mode"), parameters(SMALL))
def test_no_symmetry_is_missed_on_small_models(entry: Entry, mode: str) -> None:
    model, args, kwargs = entry.make(mode)
    graph, runner = trace_double(spread(model), args, kwargs)
    expected = graph.num_units + 8 * (f"{entry.name}-{mode}" in UNTOLD)
    # every finite sample overcounts at worst, so the smaller of two counts is the better one
    found = scaling_dimension(runner)[0]
    if found != expected:
        found = min(found, scaling_dimension(runner, sizes=(0.3, 0.5, 0.7))[0])
    assert found == expected


def test_committed_survey_is_what_its_data_say() -> None:
    rows = json.loads(DATA.read_text())
    assert PAGE.read_text() == render(rows)
    measured = [row for row in rows if row["rescaling"] is not None]
    assert len(measured) > 400
    for row in measured:
        limit = ROUNDED.get((row["name"], row["mode"]), SOUND)
        assert max(row["rescaling"], row["balance"] or 0) <= limit, row["name"]
