"""Language models as they are published: every part of the library works on them, and on text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from real_models import MODELS
from zoo.language_figures import adapter_runs, the_pruning, the_smoothing
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


def test_a_quarter_of_the_hidden_units_is_removed(subject: Subject) -> None:
    found = the_pruning(subject)
    before, after = found["hidden"]
    assert after == 0.75 * before and found["change"] <= SAME
    assert found["parameters"][1] < 0.95 * found["parameters"][0]


def test_scales_beyond_float16_are_brought_into_its_range(subject: Subject) -> None:
    moved = subject.moved(0, spread=3.0)
    fitted = ps.fit_dtype(moved, subject.kwargs)
    assert not math.isfinite(fitted.error_before) and not fitted.fitted_before
    assert fitted.error < 0.02
    assert subject.outputs(fitted.model.to(torch.float16)).isfinite().all()


def test_adapters_learn_text_in_the_canonical_gauge(subject: Subject) -> None:
    for kind, _, losses in islice(adapter_runs(subject.name, subject.copy(), 2, 6), 2):
        assert losses[1] < losses[0] - 0.05, kind
