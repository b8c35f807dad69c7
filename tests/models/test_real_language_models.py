"""Language models as they are published: every part of the library works on them, and on text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from real_models import MODELS
from zoo.language_figures import adapter_runs, the_smoothing
from zoo.subject import Subject, change
from zoo.trained import TRAINED, params
from zoo.trained_figures import squares

import pathspace as ps
from pathspace.diagnostics import report

# (135 million weights)
pytestmark = pytest.mark.slow

SAME = 1e-5
# pairs of a block: queries and keys share no scale that tools can move
BLOCKS = {"smollm2-135m": 30, "minilm-l6": 6}
# of log-scales with which a model overflows in float16
SPREAD = {"smollm2-135m": 2.0, "minilm-l6": 3.0}


@pytest.fixture(scope="module", params=params(*MODELS))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Loaded and traced once; tests change copies."""
    yield Subject(request.param)


def test_all_weights_are_in_path_space(subject: Subject) -> None:
    assert subject.graph.num_weights == TRAINED[subject.name].weights
    assert not subject.model.training


@torch.no_grad()
def test_rescaling_and_balance_keep_the_function(subject: Subject) -> None:
    before, graph = subject.outputs(subject.model), subject.graph
    assert change(before, subject.outputs(subject.moved(0))) <= SAME
    balanced = ps.balance_(subject.copy(), graph)
    assert change(before, subject.outputs(balanced)) <= SAME
    assert squares(balanced, graph) < 0.99 * squares(subject.model, graph)


def test_the_report_holds_certificate_proof_and_chain(subject: Subject) -> None:
    facts = report(subject.model, kwargs=subject.kwargs).facts
    assert facts["certificate"]["holds"] and facts["proof"]["accepted"]
    # (attention and the layers behind it, in every block)
    assert len(facts["chain"]["nodes"]) == 2 * BLOCKS[subject.name]
    assert [part for part, found in facts.items() if found.get("absent")] == ["degeneracy"]


def test_smoothing_pairs_are_found_in_every_block(subject: Subject) -> None:
    found = the_smoothing(subject)
    assert found["pairs"] == found["exact"] and found["change"] <= SAME
    assert all(count == BLOCKS[subject.name] for count in found["kinds"].values())


@torch.no_grad()
def test_a_quarter_of_the_hidden_units_is_removed(subject: Subject) -> None:
    groups = ps.channels(subject.model, kwargs=subject.kwargs)
    small, masked = groups.remove(keep=0.75), groups.masked(keep=0.75)
    assert small.config.intermediate_size == 0.75 * subject.model.config.intermediate_size
    assert change(subject.outputs(masked), subject.outputs(small)) <= 5 * SAME


@torch.no_grad()
def test_scales_beyond_float16_are_brought_into_its_range(subject: Subject) -> None:
    fitted = ps.fit_dtype(subject.moved(0, spread=SPREAD[subject.name]), subject.kwargs)
    assert not fitted.error_before < 1 and fitted.error < 0.02
    before = subject.outputs(subject.model)
    assert change(before, subject.outputs(fitted.model.to(torch.float16))) < 0.02


def test_adapters_learn_text_in_the_canonical_gauge(subject: Subject) -> None:
    for kind, _, losses in islice(adapter_runs(subject.name, subject.copy(), 2, 6), 2):
        assert losses[1] < losses[0] - 0.05, kind
