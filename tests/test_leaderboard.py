"""The leaderboard of optimizers: runs that repeat themselves, starts that are one function, a journal that goes on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pathspace.training.experiments.reproduce import Setting, leaderboard
from pathspace.training.experiments.reproduce.leaderboard import Journal, cases, contest
from pathspace.training.experiments.reproduce.leaderboard_run import (
    ARMS,
    ONLY,
    STARTS,
    STEPS,
    TASKS,
    Result,
    Run,
    carry_out,
    prepared,
    rates,
    score,
)
from pathspace.training.experiments.reproduce.record import Record

QUICK = Run("MLP", "default", "AdamW", 0.01, seed=3, steps=5)


def test_a_run_repeats_itself() -> None:
    assert replace(carry_out(QUICK), seconds=0.0) == replace(carry_out(QUICK), seconds=0.0)
    assert carry_out(QUICK).valid != carry_out(replace(QUICK, seed=4)).valid


@pytest.mark.parametrize("task", TASKS)
def test_scrambled_starts_are_the_same_function(task: str) -> None:
    run = Run(task, "default", "AdamW", 0.01, seed=0)
    model, _ = prepared(run)
    twin, _ = prepared(replace(run, start="scrambled 10"))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    split = TASKS[task][1]()[1]
    # (a norm's eps is seen where its inputs became small)
    assert score(model, split)[0] == pytest.approx(score(twin, split)[0], rel=0.1)


@pytest.mark.parametrize("arm", ARMS)
def test_every_contender_takes_steps(arm: str) -> None:
    task = ONLY.get(arm, ("MLP",))[0]
    assert not carry_out(Run(task, "default", arm, rates(arm)[3], seed=0, steps=5)).reason.startswith(arm)
    assert len(rates(arm)) == 8 and min(rates(arm)) == ARMS[arm][0]


def test_what_fails_is_counted() -> None:
    assert carry_out(replace(QUICK, arm="SGD", lr=1e4, steps=20)).failed
    refused = carry_out(Run("CNN", "default", "Path-SGD", 0.1, seed=0))
    assert refused.failed and refused.reason.startswith("PathSGD found")


def test_rates_are_chosen_by_the_tuning_seed_alone() -> None:
    def result(run: Run) -> Result:
        # the tuning seed likes 0.003; others are best elsewhere
        return Result(abs(run.lr - 0.003) + run.seed / 1e4, run.lr, 0.5, run.lr > 0.5, "", 0.0)

    chosen = [("default", "MLP", arm) for arm in ("SGD", "AdamW")]
    found = list(contest(result, chosen, (0, 1)))
    assert [(e.arm, e.lr, len(e.results)) for e in found] == [("SGD", 0.003, 2), ("AdamW", 0.003, 4)]


def test_cases_begin_with_the_question_and_leave_nothing_out() -> None:
    found = list(cases())
    assert len(found) == len(set(found)) == len(STARTS) * sum(len(ONLY.get(arm, TASKS)) for arm in ARMS)
    assert {arm for _, _, arm in found[: 4 * len(TASKS)]} == {"AdamW", "gauge-fixed AdamW"}
    assert set(STEPS) == set(TASKS)


def test_the_record_counts_failures_and_compares_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(run: Run) -> Result:
        if run.arm == "SGD":
            return Result(math.nan, math.nan, math.nan, True, "diverged", 1.0)
        test = (1.0 if run.arm == "AdamW" and run.start != "default" else 0.5) + run.seed / 1e3
        return Result(test + run.lr, test, 0.1, False, "", 1.0)

    monkeypatch.setattr(leaderboard, "carry_out", pretend)
    found = leaderboard.run(Setting(run=lambda trials: [], shrink=10, folder=tmp_path))
    found.write(tmp_path / "record.json")
    again = Record.read(tmp_path / "record.json")
    assert again.ours == found.ours and leaderboard.draw(again).axes
    rows = {row[:2]: row[2:] for row in found.ours.rows}
    assert len(rows) == sum(len(ONLY.get(arm, TASKS)) for arm in ARMS)
    assert rows["MLP", "SGD"][0] == "2.303 ± 0.000 (0.001*, 5 failed)"
    verdicts = {claim["statement"]: claim["verdict"] for claim in found.claims}
    ours = "gauge-fixed AdamW ends lower than AdamW"
    assert verdicts[f"MLP, scrambled 100 start: {ours}"] == "better"
    assert verdicts[f"MLP, default start: {ours}"] != "better"
    # SGD never learns here, so that a start that hurts it cannot be seen
    slowed = "SGD ends lower from the default start than from the scrambled 100 one"
    assert {c["nothing"] for c in found.claims if slowed in c["statement"]} == {"neither beats a guess"}
    # the first families are as large as there are tasks, and the same p-value is corrected for six claims there
    assert [claim["count"] for claim in found.claims[:12]] == 2 * [10, 10, 10, 5, 5, 5]
    (first, *_), columns = found.data["standing"]["rows"], found.data["standing"]["columns"]
    told = dict(zip(columns, first, strict=True))
    assert told["within AdamW's interval or better"] == told["as from the default start"] == "yes"
    assert told["scrambling hurts AdamW"] == told["gauge-fixed lower when scrambled"] == "yes"
    # later, when no time is left, the journal knows the same
    monkeypatch.setattr(leaderboard, "carry_out", lambda run: pytest.fail("run again"))
    late = leaderboard.run(Setting(run=lambda trials: [], shrink=10, folder=tmp_path, minutes=0.0))
    assert late.claims == found.claims and late.ours == found.ours
    none = leaderboard.run(Setting(run=lambda trials: [], folder=tmp_path, minutes=0.0))
    assert not none.ours.rows and any("Not run: SGD, AdamW" in line for line in none.differs)


def test_a_journal_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs" / "journal.jsonl"
    first = Journal(path).result(QUICK)
    failed = Journal(path).result(replace(QUICK, arm="SGD", lr=1e4, steps=20))
    monkeypatch.setattr(leaderboard, "carry_out", lambda run: pytest.fail("run again"))
    again = Journal(path)
    assert again.result(QUICK) == first
    assert again.result(replace(QUICK, arm="SGD", lr=1e4, steps=20)).failed is failed.failed is True
