"""The page of the statements on Markov chains has the figures of its run."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import markov_run
from benchmarks.figures import load, shows
from benchmarks.markov import NAME, PAGE, render
from benchmarks.markov_run import NETWORKS, TAUS
from torch.utils._pytree import tree_leaves

from pathspace.training.experiments.tasks.digits import image_splits


def test_the_figures_of_the_claims_are_those_of_the_run() -> None:
    """The page is written from the committed figures; write it again: ``python -m
    benchmarks.markov --page FILE``.
    """
    found = load(NAME)
    assert shows(PAGE, NAME, render(found))
    assert found["seeds"] >= 5 and len(found["rows"]) == found["seeds"] * len(NETWORKS) * len(TAUS)


@pytest.mark.slow
def test_a_run_has_every_figure_that_the_page_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short one, on one network and on digits; the same seed gives the same figures,
    which are measured once.
    """
    train, _, test = image_splits()
    small = [part[:200].squeeze(1).double() if part.is_floating_point() else part[:200]
             for part in (train.inputs, train.targets, test.inputs, test.targets)]  # fmt: skip
    settings = {"TAUS": (0.0, 3e-4), "AT_A_TIME": 70, "COMPARED": {"MLP": 3}}
    for name, value in (settings | {"data": lambda: tuple(small)}).items():
        monkeypatch.setattr(markov_run, name, value)
    rows = markov_run.measure(2, 3, ["MLP"], tmp_path / "rows.jsonl")
    assert rows == markov_run.measure(2, 3, ["MLP"], None)
    assert [(row["seed"], row["tau"]) for row in rows[1]] == [(2, 0.0), (2, 3e-4)]
    for name in ("measure_one", "compare_one"):
        monkeypatch.setattr(markov_run, name, lambda *_: pytest.fail("measured again"))
    assert rows == markov_run.measure(2, 3, ["MLP"], tmp_path / "rows.jsonl")
    short = markov_run.summary(*rows, 2, 3)
    for a, b in zip(*(tree_leaves(one["vectors"]) for one in (short, load(NAME))), strict=True):
        # what is rounding is another machine's too, up to its size
        assert a == pytest.approx(b, rel=1e-6, abs=1e-12)
    kept = load(NAME)["rows"][0]
    row = short["rows"][0]
    assert row.keys() == kept.keys() and row["trained"].keys() == kept["trained"].keys()
    assert row["trained"]["lemma2"][0] == row["trained"]["lemma2"][1] > 0
