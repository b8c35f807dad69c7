"""The figures on the pages are those of the files beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import advice, one_thread
from benchmarks.__main__ import in_markdown
from benchmarks.gpu import page as gpu_page
from benchmarks.starts import STARTS, table

from pathspace.training.experiments.intervals import t_interval
from pathspace.training.experiments.json_lines import read_lines
from pathspace.training.experiments.reproduce import Setting, leaderboard, leaderboard_run
from pathspace.training.experiments.reproduce.markdown import markdown_table
from pathspace.training.experiments.reproduce.record import Record, Table
from pathspace.training.experiments.reproduce.trial_cache import TrialCache, run_all

DOCS = Path(__file__).parents[2] / "docs"


def test_the_comparison_of_starts_is_that_of_its_file() -> None:
    kept = json.loads((DOCS / "data" / "starts.json").read_text())
    assert table(kept["rows"]) in (DOCS / "optimizers.md").read_text()
    assert [row["start"] for row in kept["rows"]] == [start.label for start in STARTS]
    # the same number of rates for everybody, the same seeds, and the rate that
    # the validation split chose
    for row in kept["rows"]:
        sums = {rate: sum(errors) for rate, errors in row["valid_error"].items()}
        assert len(row["test_accuracy"]) == kept["seeds"]
        assert len(sums) == len(row["rates"]) == 6
        assert f"{row['lr']:g}" == min(sums, key=lambda rate: sums[rate])


@pytest.mark.slow
def test_the_standing_of_the_leaderboard_is_that_of_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Record.read(DOCS / "reproduction" / "optimizers.json")
    kept = record.data["standing"]
    table = Table(tuple(kept["columns"]), tuple(tuple(row) for row in kept["rows"]))
    assert markdown_table(table) in (DOCS / "gauge-fixed.md").read_text()
    # and the record is that of its journal: no run is missing, none is carried out
    path = DOCS / "reproduction" / "optimizers.jsonl"
    runs = [line for line in read_lines(path) if "run" in line]
    # (the data need not be here: their digests stand beside the runs)
    digests = {(line["run"]["task"], line["run"]["scale"]): line["data"] for line in runs}
    monkeypatch.setattr(leaderboard_run, "run_data", lambda *of: digests[of])
    journal = TrialCache(None, path)
    again = leaderboard.run(
        Setting(
            lambda trials: run_all(trials, journal),
            record.scale,
            seeds=tuple(range(10)),
            by_power=True,
            # (the bound that the record names)
            most_seeds=60,
        )
    )
    assert (
        again.claims == record.claims
        and again.ours == record.ours
        and again.differs == record.differs
        and again.protocol == record.protocol
    )


def test_the_advice_on_the_page_is_that_of_its_file_and_never_fails() -> None:
    kept = json.loads((DOCS / "data" / "advice.json").read_text())
    assert in_markdown(advice.table(kept["rows"])) in (DOCS / "gauge-fixed.md").read_text()
    assert all(row["falls"] for row in kept["rows"])


def test_the_benchmarks_are_those_of_their_file() -> None:
    kept = json.loads((DOCS / "data" / "benchmarks.json").read_text())
    page = (DOCS / "benchmarks.md").read_text()
    assert all(in_markdown(kept[part]) in page for part in ("analysis", "penalty") if part in kept)


def test_the_figures_of_one_thread_are_those_of_their_file() -> None:
    kept = json.loads((DOCS / "data" / "one_thread.json").read_text())
    page = (DOCS / "benchmarks.md").read_text()
    assert all(one_thread.table(kept[part]) in page for part in one_thread.PARTS)
    # a training step in the canonical gauge costs at most 4 % more
    assert all(row["fixed/adamw"] < 1.04 for rows in kept["fixed"].values() for row in rows)


def test_the_page_about_gpus_is_that_of_its_file() -> None:
    """It says that nothing was measured until ``make gpu`` has written figures."""
    file = DOCS / "data" / "gpu.json"
    kept = json.loads(file.read_text()) if file.exists() else None
    assert (DOCS / "gpu.md").read_text() == gpu_page(kept)
    assert "**Not measured.**" in gpu_page(None)
    times = {"backward_ms": 9.0, "sgd_ms": 1.0, "gsgd_ms": 1.5, "gsgd_fused_ms": 1.1}
    made = {
        "device": "H",
        "torch": "2",
        "cuda": "12",
        "tests": {"passed": 3},
        "training": [{"model": "m", **times}],
    }
    assert "| m | 10.000 | 10.500 | 10.100 | 1.050 | 1.010 | holds |" in gpu_page(made)
    assert "does not hold" in gpu_page(
        {**made, "training": [{"model": "m", **times, "gsgd_fused_ms": 1.3}]}
    )


# record, task, how the page calls it, optimizers, what its arm with the unit skeleton adds
UNIT_STARTS = (
    ("smnist", "fashion-28", "28 rows", ("SGD", "Adam"), ""),
    ("smnist", "fashion-28-permuted", "28 rows, permuted pixels", ("SGD", "Adam"), ""),
    ("race", "fashion-14", "14 rows, 10,000 images", ("SGD",), ", unit skeleton"),
)


def test_effects_of_the_unit_skeleton_are_those_of_the_records() -> None:
    page = (DOCS / "optimizers.md").read_text()
    for name, task, shown, optimizers, more in UNIT_STARTS:
        arms = Record.read(DOCS / "reproduction" / f"{name}.json").data["arms"]
        found = {arm["label"]: arm for arm in arms if arm["task"] == task}
        for optimizer in optimizers:
            first, second = found[optimizer + more], found[f"{optimizer}, default start"]
            change = t_interval(
                [
                    100 * (a - b) / second["mean"]
                    for a, b in zip(first["tests"], second["tests"], strict=True)
                ]
            )
            interval = f"{change.mean:+.1f} ± {change.half_width:.1f} %"
            assert f"| {shown} | {optimizer} | {interval} | {change.count} |" in page
