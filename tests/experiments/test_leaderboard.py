"""The leaderboard of optimizers: runs that repeat themselves, starts that are one
function, a journal that goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pathspace.training.experiments.json_lines import read_lines
from pathspace.training.experiments.reproduce import Setting, leaderboard, leaderboard_run
from pathspace.training.experiments.reproduce.leaderboard import contest
from pathspace.training.experiments.reproduce.leaderboard_run import (
    ARMS,
    ONLY,
    SIMPLE,
    TASKS,
    Result,
    Run,
    carry_out,
    prepared,
    rates,
    score,
)
from pathspace.training.experiments.reproduce.record import Record
from pathspace.training.experiments.reproduce.trial import together
from pathspace.training.experiments.reproduce.trial_cache import TrialCache, run_all

QUICK = Run("MLP", "default", "AdamW", 0.01, seed=3, steps=5)


def test_a_run_repeats_itself() -> None:
    assert replace(carry_out(QUICK), seconds=0.0) == replace(carry_out(QUICK), seconds=0.0)
    assert carry_out(QUICK).valid != carry_out(replace(QUICK, seed=4)).valid


@pytest.mark.parametrize("task", TASKS)
def test_scrambled_starts_are_the_same_function(task: str) -> None:
    run = Run(task, "default", "AdamW", 0.01, seed=0)
    model, _ = prepared(run)
    twin, _ = prepared(replace(run, start="scrambled 10"))
    assert not all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    split = TASKS[task][1]("embedded")[1]
    # (a norm's eps is seen where its inputs became small)
    assert score(model, split)[0] == pytest.approx(score(twin, split)[0], rel=0.1)


@pytest.mark.parametrize("arm", ARMS)
def test_every_contender_takes_steps(arm: str) -> None:
    task = ONLY.get(arm, ("MLP",))[0]
    assert not carry_out(
        Run(task, "default", arm, rates(arm)[3], seed=0, steps=5)
    ).reason.startswith(arm)
    assert len(rates(arm)) == 8 and min(rates(arm)) == ARMS[arm][0]


def test_what_fails_is_counted() -> None:
    assert carry_out(replace(QUICK, arm="SGD", lr=1e4, steps=20)).failed
    refused = carry_out(
        Run("batch-norm ResNet", "default", "conditioned start, AdamW", 0.1, seed=0)
    )
    assert refused.failed and refused.reason not in ("", "diverged") and math.isnan(refused.test)


def quick(**given: Any) -> Setting:
    """Ten seeds, a tenth of the steps."""
    run = partial(run_all, cache=TrialCache(None))
    return Setting(**{"run": run, "shrink": 10, "seeds": tuple(range(10)), **given})


def pretending(monkeypatch: pytest.MonkeyPatch, result: Callable[[Run], Result]) -> list[Run]:
    """Let runs end at once; the ones that are carried out are listed."""
    done: list[Run] = []

    def pretend(run: Run) -> Result:
        done.append(run)
        return result(run)

    monkeypatch.setattr(leaderboard_run, "carry_out", pretend)
    return done


@pytest.mark.parametrize(
    ("spread", "gap", "most", "expected"),
    [
        (0.01, 0.0, None, 10),
        (0.06, 0.5, None, 10),
        (0.18, 0.0, None, 191),
        (0.18, 0.0, 60, 60),
    ],
)
def test_the_pilot_says_how_many_seeds_are_needed(
    monkeypatch: pytest.MonkeyPatch, spread: float, gap: float, most: int | None, expected: int
) -> None:
    """A wide spread needs more seeds, with no bound but the user's, a large effect fewer;
    nothing of the pilot is reported.
    """

    def result(run: Run) -> Result:
        swing = 0.0 if run.arm == "AdamW" else spread * math.cos(3 * run.seed) - gap
        return Result(run.lr, 1.0 + swing, 0.5, False, "", 0.0)

    done = pretending(monkeypatch, result)
    chosen = [("scrambled 100", "MLP", arm) for arm in ("AdamW", "gauge-fixed AdamW", "G-Adam")]
    setting = quick(by_power=True, most_seeds=most)
    found = {e.arm: len(e.results) for e in contest(chosen, setting)}
    wanted = pytest.approx(expected, rel=0.3 * (expected not in (10, most)))
    assert found["AdamW"] == found["gauge-fixed AdamW"] == wanted
    # no claim is about G-Adam
    assert found["G-Adam"] == 5 and not any(run.arm == "G-Adam" and run.seed < 5 for run in done)


@pytest.mark.slow
def test_the_record_counts_failures_and_compares_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(run: Run) -> Result:
        if run.arm == "SGD":
            return Result(math.nan, math.nan, math.nan, True, "diverged", 1.0)
        hurt = run.arm == "AdamW" and run.start != "default"
        test = 0.9 if run.arm == SIMPLE else 1.0 if hurt else 0.5
        test += run.seed / 1e3
        return Result(test + run.lr, test, 0.1, False, "", 1.0)

    monkeypatch.setattr(leaderboard_run, "carry_out", pretend)
    journal = tmp_path / "optimizers.jsonl"
    found = leaderboard.run(quick(run=partial(run_all, cache=TrialCache(None, journal))))
    found.write(tmp_path / "record.json")
    again = Record.read(tmp_path / "record.json")
    assert again.ours == found.ours and leaderboard.draw(again).axes
    rows = {row[:2]: row[2:] for row in found.ours.rows}
    assert len(rows) == sum(len(ONLY.get(arm, TASKS)) for arm in ARMS)
    assert rows["MLP", "SGD"][0] == "2.303 ± 0.000 (1e-06*, 10 failed)"
    assert rows["MLP", SIMPLE][1:] == ("–", "–", "–")
    verdicts = {claim["statement"]: claim["verdict"] for claim in found.claims}
    ours = "gauge-fixed AdamW ends lower than AdamW"
    assert verdicts[f"MLP, scrambled 100 start: {ours}"] == "better"
    assert verdicts[f"MLP, default start: {ours}"] != "better"
    # SGD never learns here, so that a start that hurts it cannot be seen
    slowed = "SGD ends lower from the default start than from the scrambled 100 one"
    assert {c["nothing"] for c in found.claims if slowed in c["statement"]} == {
        f"neither beats the {SIMPLE}"
    }
    # the first families are as large as there are tasks
    assert [claim["count"] for claim in found.claims] == len(found.claims) * [10]
    assert [ours in claim["statement"] for claim in found.claims[:12]] == 6 * [True] + 6 * [False]
    (first, *_), columns = found.data["standing"]["rows"], found.data["standing"]["columns"]
    told = dict(zip(columns, first, strict=True))
    assert told["within AdamW's interval or better"] == told["as from the default start"] == "yes"
    assert told["scrambling hurts AdamW"] == told["gauge-fixed lower when scrambled"] == "yes"
    # the journal knows the same
    monkeypatch.setattr(leaderboard_run, "carry_out", lambda run: pytest.fail("run again"))
    late = leaderboard.run(quick(run=partial(run_all, cache=TrialCache(None, journal))))
    assert late.claims == found.claims and late.ours == found.ours


def test_other_data_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that changed must not lead to the result of the old ones."""
    cache = TrialCache(None, tmp_path / "journal.jsonl")
    run_all([QUICK], cache)
    build, data = TASKS[QUICK.task]
    first, *rest = data(QUICK.scale)
    turned = replace(first, targets=first.targets.flip(0)), *rest
    leaderboard_run.run_data.cache_clear()
    assert cache.find(QUICK) is not None
    with monkeypatch.context() as changed:
        leaderboard_run.run_data.cache_clear()
        changed.setitem(TASKS, QUICK.task, (build, lambda _: turned))
        assert cache.find(QUICK) is None
    leaderboard_run.run_data.cache_clear()


def test_committed_runs_are_known_by_their_settings_and_their_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the data of that time: what was recorded follows from the journal alone, to the byte."""
    folder = Path(__file__).parents[2] / "docs" / "reproduction"
    lines = [line for line in read_lines(folder / "optimizers.jsonl") if "run" in line]
    told = {(line["run"]["task"], line["run"]["scale"]): line["data"] for line in lines}
    monkeypatch.setattr(leaderboard_run, "run_data", lambda *task: told[task])
    cache = TrialCache(None, folder / "optimizers.jsonl")
    assert all(cache.find(Run(**line["run"])) is not None for line in lines)
    monkeypatch.setattr(leaderboard_run, "carry_out", lambda run: pytest.fail("run again"))
    run = partial(run_all, cache=cache)
    found = leaderboard.run(quick(run=run, scale="fetched", shrink=1, by_power=True, most_seeds=60))
    recorded = Record.read(folder / "optimizers.json")
    assert (found.ours, found.protocol) == (recorded.ours, recorded.protocol)
    assert (found.claims, found.differs) == (recorded.claims, recorded.differs)
    assert together(cache.origins) == recorded.versions
