"""The comparison: the validation split chooses, the test split is looked at afterwards, the numbers add up."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

import pathspace.training.experiments.demo as demo
from pathspace.errors import InputError
from pathspace.training.experiments.experiment import ARMS, Comparison, Plan, Run, choose_rate, compare, judge
from pathspace.training.experiments.intervals import t_interval
from pathspace.training.experiments.plots import draw_comparison, save_figure
from pathspace.training.experiments.results import difference_sentence, results_table, write_tables
from pathspace.training.experiments.tasks import load_task
from pathspace.training.history import EpochRecord, History

TASK = load_task("digits-rows", hidden=5)


def run(rate: float, seed: int = 0, valid: float = 0.1, loss: float = 0.3, test: float = 0.1, arm: int = 0) -> Run:
    """A finished run with these results; a NaN loss means that it diverged."""
    history = History((EpochRecord(1, 38, loss, loss, valid, 0.1),))
    return Run(ARMS[arm], rate, seed, history, history.diverged or valid > 0.5, lambda: test)


def looked(*_: object) -> float:
    raise AssertionError("the test split was looked at")


def printed(show: Callable[[Console], object]) -> str:
    console = Console(width=80, file=io.StringIO())
    show(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_validation_alone_chooses_the_rate() -> None:
    runs = [run(0.1, valid=0.05, test=0.9), run(0.2, valid=0.06, test=0.0)]
    assert choose_rate(runs) == 0.1
    assert choose_rate([replace(r, test=looked) for r in runs]) == 0.1
    verdict = judge(ARMS[0], [runs[0], replace(runs[1], test=looked)])
    assert (verdict.lr, verdict.test.mean) == (0.1, 0.9)


def test_choice_averages_over_seeds() -> None:
    runs = [run(0.1, 0, valid=0.0), run(0.1, 1, valid=0.3), run(0.2, 0, valid=0.1), run(0.2, 1, valid=0.1)]
    assert choose_rate(runs) == 0.2


def test_ties_go_to_the_lower_loss_and_then_to_the_smaller_rate() -> None:
    assert choose_rate([run(0.1, loss=0.3), run(0.2, loss=0.2)]) == 0.2
    assert choose_rate([run(0.2), run(0.1)]) == 0.1


def test_a_rate_at_which_a_seed_diverged_comes_last() -> None:
    runs = [run(0.1, 0, valid=0.0), run(0.1, 1, loss=math.nan), run(0.2, 0, valid=0.4), run(0.2, 1, valid=0.4)]
    assert choose_rate(runs) == 0.2
    verdict = judge(ARMS[0], runs)
    assert (verdict.diverged, verdict.failed) == (0, 1)


def test_an_arm_that_always_diverges_has_no_result() -> None:
    runs = [replace(run(rate, seed, loss=math.nan), test=looked) for rate in (0.1, 0.2) for seed in (0, 1)]
    verdict = judge(ARMS[0], runs)
    assert (verdict.diverged, verdict.failed, verdict.test.count) == (2, 4, 0)
    assert verdict.test.show(".1%") == "–"


def test_intervals_are_students() -> None:
    # mean 2, standard deviation 1, t(0.975, 2) = 4.302653
    assert t_interval([1, 2, 3]).half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert t_interval([1, 2, 3, 6], confidence=0.9).half_width == pytest.approx(2.353363 * 2.160247 / 2, rel=1e-6)
    assert math.isnan(t_interval([5.0]).half_width) and t_interval([5.0]).show(".1f") == "5.0"


def test_difference_is_paired_by_seed() -> None:
    first = [run(0.1, seed, test=test, arm=0) for seed, test in ((0, 0.10), (1, 0.20), (2, 0.30))]
    second = [run(0.1, seed, test=test, arm=1) for seed, test in ((0, 0.09), (1, 0.19), (2, 0.29))]
    verdicts = judge(ARMS[0], first), judge(ARMS[1], second)
    comparison = Comparison(Plan(TASK, ARMS[:2]), (*first, *second), verdicts)
    interval = comparison.difference(*verdicts)
    assert interval.mean == pytest.approx(0.01) and interval.half_width < 1e-9 < abs(interval.mean)
    assert "excludes zero" in difference_sentence(comparison, *verdicts)
    assert "includes zero" in difference_sentence(comparison, verdicts[0], verdicts[0])


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    plan = Plan(TASK, rates=(0.02, 0.1, 1e6), seeds=(0, 1), epochs=2)
    begun: list[str] = []
    result = compare(plan, lambda name: begun.append(name) or (lambda tick: None))  # type: ignore[func-returns-value]
    assert len(begun) == len(set(begun)) == plan.size == len(result.runs) == 18
    return result


def test_runs_at_other_rates_never_see_the_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    task = replace(TASK, metric=lambda outputs, targets: scored.append(len(targets)) or TASK.metric(outputs, targets))  # type: ignore[func-returns-value]
    compare(Plan(task, ARMS[:1], rates=(0.02, 0.1), seeds=(0, 1), epochs=1))
    # four runs score the 240 validation examples after their epoch, the two chosen ones the 360 test examples
    assert sorted(scored) == [240] * 4 + [360] * 2 and scored[-2:] == [360, 360]


def test_comparison_repeats_itself(comparison: Comparison) -> None:
    again = compare(comparison.plan)
    assert [v.test_by_seed for v in again.verdicts] == [v.test_by_seed for v in comparison.verdicts]
    assert [v.lr for v in again.verdicts] == [v.lr for v in comparison.verdicts]


def test_tables_are_well_formed(comparison: Comparison, tmp_path: Path) -> None:
    read = {}
    for path in write_tables(comparison, tmp_path):
        with path.open(newline="") as file:
            lines = list(csv.reader(file))
        assert {len(line) for line in lines} == {len(lines[0])}
        read[path.name] = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [len(read[name]) for name in ("comparison.csv", "runs.csv")] == [3, 18]
    assert len(read["epochs.csv"]) == sum(len(run.history.records) for run in comparison.runs)
    for row, verdict in zip(read["comparison.csv"], comparison.verdicts, strict=True):
        tested = [
            float(run["test_error"])
            for run in read["runs.csv"]
            if run["arm"] == verdict.arm.label and run["test_error"]
        ]
        assert sum(tested) / len(tested) == pytest.approx(float(row["test_error"]), rel=1e-12)
        assert {r["learning_rate"] for r in read["runs.csv"] if r["arm"] == row["arm"] and r["test_error"]} == {
            row["learning_rate"]
        }
    assert all(run["status"] in ("ok", "failed", "diverged") for run in read["runs.csv"])
    assert all(run["status"] != "ok" for run in read["runs.csv"] if run["learning_rate"] == "1000000.0")


def test_printed_table_names_every_arm_and_the_edge_of_the_grid(comparison: Comparison) -> None:
    text = printed(lambda console: console.print(results_table(comparison)))
    assert all(arm.label in text for arm in ARMS) and "%" in text
    at_edge = any(verdict.lr in (0.02, 1e6) for verdict in comparison.verdicts)
    assert ("*:" in text) == at_edge


def test_figure_is_drawn_and_repeats_itself(comparison: Comparison, tmp_path: Path) -> None:
    png, svg = save_figure(draw_comparison(comparison), tmp_path / "curves")
    assert png.read_bytes().startswith(b"\x89PNG") and ElementTree.parse(svg).getroot().tag.endswith("svg")
    before = png.read_bytes(), svg.read_bytes()
    save_figure(draw_comparison(comparison), tmp_path / "curves")
    assert before == (png.read_bytes(), svg.read_bytes())


def test_figure_is_drawn_where_everything_diverged(tmp_path: Path) -> None:
    runs = tuple(run(rate, seed, loss=math.nan) for rate in (0.1, 0.2) for seed in (0, 1))
    plan = Plan(TASK, ARMS[:1], rates=(0.1, 0.2), seeds=(0, 1))
    png, _ = save_figure(draw_comparison(Comparison(plan, runs, (judge(ARMS[0], runs),))), tmp_path / "curves")
    assert png.stat().st_size > 1000


def test_demo_leaves_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODELS", demo.MODELS[-1:])
    folder = tmp_path / "new" / "demo"
    options = {"epochs": 1, "seeds": (0, 1), "rates": (0.05,), "hidden": 4}
    text = printed(lambda console: demo.run_demo(folder, console=console, **options))  # type: ignore[arg-type]
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert found == {
        "masks/loop_rnn.safetensors",
        "certificates/loop_rnn.json",
        "comparison.csv",
        "runs.csv",
        "epochs.csv",
        "learning_curves.png",
        "learning_curves.svg",
    }
    assert "pathspace train digits-rows" in text and "holds" in text and "fails" not in text


def test_demo_refuses_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="Cannot make the folder"):
        demo.run_demo(tmp_path / "file", console=Console(quiet=True))
    assert (tmp_path / "file").read_text() == "mine"
