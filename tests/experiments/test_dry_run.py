"""``pathspace reproduce NAME --dry-run``: which runs are missing, how long they take, and how many
seeds their spread asks for.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from recipe_meters import stand_in
from training_command import call, flat

from pathspace.training.experiments.reproduce import EXPERIMENTS, Setting, estimate_others, toys
from pathspace.training.experiments.reproduce.estimate import UNKNOWN, of_trials, planned
from pathspace.training.experiments.reproduce.estimate_others import (
    OTHERS,
    TOY_STEPS,
    of_contest,
    seconds_of_run,
)
from pathspace.training.experiments.reproduce.experiment import TUNING_SEEDS, fresh_seeds
from pathspace.training.experiments.reproduce.leaderboard_contest import cases, contest, run_data
from pathspace.training.experiments.reproduce.leaderboard_run import Result, Run, rates
from pathspace.training.experiments.reproduce.leaderboard_tasks import TASKS
from pathspace.training.experiments.reproduce.timing import LEAST, MOST, alternate, rounds_needed
from pathspace.training.experiments.reproduce.trial import Outcome, Trial
from pathspace.training.experiments.reproduce.trial_cache import TrialCache
from pathspace.training.experiments.reproduce.tuning import Arm, measure_enough, versus

RACE = EXPERIMENTS["race"]


def never(*_: object) -> object:
    raise AssertionError("a run was carried out")


def outcome(trial: Trial, wide: float = 0.0) -> Outcome:
    """The largest rate is the best; errors of seeds differ by a share of the mean."""
    test = 0.2 * (1 + wide * math.cos(5 * trial.seed + len(trial.optimizer)))
    return Outcome((1.0,), (1.0,), (1 / trial.lr,), 60.0, False, test, test, (test, test))


# ---- trials --------------------------------------------------------------------------------------


def test_known_runs_choose_the_rates_and_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathspace.training.experiments.reproduce.estimate.seconds_of", never)
    setting = Setting(run=lambda _: [], shrink=30)
    cache = TrialCache(tmp_path)
    tuned = [trial for trial in planned(RACE, setting)[0] if trial.seed in TUNING_SEEDS]
    for trial in tuned:
        cache.keep(trial, outcome(trial))
    fresh = [trial for trial in planned(RACE, setting, cache.find)[0] if trial.test]
    for init in ("default", "unit-skeleton"):
        for optimizer in ("sgd", "gsgd"):
            mine = [
                {trial.lr for trial in some if (trial.init, trial.optimizer) == (init, optimizer)}
                for some in (tuned, fresh)
            ]
            assert mine[1] == {max(mine[0])}
    for trial in fresh[:4]:
        cache.keep(trial, outcome(trial))
    found = of_trials(RACE, setting, cache)
    assert (found.known, found.missing, found.seeds) == (len(tuned) + 4, len(fresh) - 4, "")
    # as long as the known ones of the same kind
    assert found.seconds == 60.0 * found.missing


def test_the_unknown_is_no_ones_choice() -> None:
    assert UNKNOWN.valid_metrics == (math.inf,) and not UNKNOWN.diverged


@pytest.mark.parametrize("most", [None, 20])
def test_a_dry_run_says_how_many_seeds_the_first_ones_ask_for(
    tmp_path: Path, most: int | None
) -> None:
    setting = Setting(run=lambda _: [], by_power=True, shrink=30, most_seeds=most)
    known = {trial: outcome(trial, 0.2) for trial in planned(RACE, setting)[0]}
    assert len({trial.seed for trial in known if trial.test}) == 5
    asked, _ = planned(RACE, setting, lambda trial: outcome(trial, 0.2))
    seeds = len({trial.seed for trial in asked if trial.test})
    assert seeds == most if most else seeds > 100
    cache = TrialCache(tmp_path)
    begun = of_trials(RACE, setting, cache)
    assert begun.seeds == ", and more where the spread of the first seeds asks for it"
    for trial in planned(RACE, setting, lambda t: outcome(t, 0.2))[0]:
        if trial.seed in (*TUNING_SEEDS, *range(5)):
            cache.keep(trial, outcome(trial, 0.2))
    found = of_trials(RACE, setting, cache)
    assert found.seeds == f" with {seeds} seeds, by the spread of the first 5"
    assert found.missing == 4 * (seeds - 5)


# ---- seeds by power ------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [None, 30])
def test_nothing_but_the_option_bounds_the_number_of_seeds(most: int | None) -> None:
    """More than a thousand of them, none of which has chosen a rate."""

    def run(trials: Sequence[Trial]) -> list[Outcome]:
        return [outcome(trial, 0.5) for trial in trials]

    small = Trial("digits-rows", "sgd", 0.1, 0, 1, options=(("hidden", 3),))
    arms = [Arm(name, replace(small, optimizer=name), (0.1,)) for name in ("sgd", "gsgd")]
    setting = Setting(run=run, by_power=True, most_seeds=most)
    measured, (claim,) = measure_enough(
        arms, setting, lambda found: [versus("less", found[1], found[0], (0.98, 1.0))]
    )
    assert claim.count == len(measured[0].outcomes)
    assert claim.count == most if most else claim.count > 1100
    told = any(f"probability of 80 %, at most {most}" in line for line in setting.protocol)
    assert told == (most is not None)


def test_fresh_seeds_are_none_of_those_that_choose_rates() -> None:
    assert fresh_seeds(5) == (0, 1, 2, 3, 4)
    many = fresh_seeds(1500)
    assert len(set(many)) == 1500 and not set(many) & set(TUNING_SEEDS)


@pytest.mark.parametrize(
    "words", [["race"], ["race", "--scale", "fetched", "--seeds", "4"], ["toy"]]
)
def test_a_bound_of_what_is_not_by_power_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("reproduce", *words, "--most-seeds", 10, "--dry-run")
    assert result.exit_code == 2 and "--most-seeds bounds the number of seeds" in flat(
        result.stderr
    )


# ---- the contest of optimizers -------------------------------------------------------------------


def journal(path: Path, runs: dict[Run, Result]) -> None:
    lines = [
        {
            "run": asdict(run),
            "data": run_data(run.task, run.scale),
            "result": result.to_dict(),
        }
        for run, result in runs.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def results(run: Run) -> Result:
    """The sixth of eight rates is the best."""
    return Result(
        abs(math.log(run.lr / rates(run.arm)[5])),
        1.0 + 1e-3 * math.cos(run.seed),
        0.5,
        False,
        "",
        30.0,
    )


class Whole(estimate_others.Plan):
    """A journal in which every run that is asked for has ended."""

    def carry_out(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.known.setdefault(run, results(run))


@pytest.mark.slow
def test_runs_in_the_journal_of_the_contest_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_others, "seconds_of_run", lambda run: 90.0)
    setting = Setting(run=lambda _: [], seeds=tuple(range(4)), folder=tmp_path, shrink=50)
    nothing = of_contest(setting)
    whole = Whole(tmp_path / "none.jsonl")
    contest(whole, list(cases()), setting)
    runs = whole.known
    assert nothing.known == 0 and nothing.missing == len(runs) > 1000
    assert nothing.seconds == 90.0 * len(runs) and nothing.seeds == " with up to 4 seeds"
    assert not list(tmp_path.iterdir())
    # an interrupted contest has ended the first of them
    some = dict(list(runs.items())[: len(runs) * 9 // 10])
    journal(tmp_path / "optimizers.jsonl", some)
    rest = of_contest(setting)
    assert (rest.known, rest.missing) == (len(some), len(runs) - len(some))
    assert rest.seconds == pytest.approx(30.0 * rest.missing)
    journal(tmp_path / "optimizers.jsonl", runs)
    done = of_contest(setting)
    assert (done.known, done.missing, done.seconds) == (len(runs), 0, 0.0)
    # other budgets are other runs
    assert of_contest(replace(setting, shrink=20)).known == 0
    # pilots say how many seeds there will be
    powered = of_contest(replace(setting, by_power=True))
    assert powered.missing > 0 and powered.seeds.endswith("more where pilots ask for it")


def test_a_dry_run_of_the_contest_divides_by_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimate_others, "seconds_of_run", lambda run: 60.0)
    minutes = []
    for jobs in (1, 2):
        text = flat(call("reproduce", "optimizers", "--dry-run", "--jobs", jobs).output)
        assert "0 are known." in text and f"minutes with --jobs {jobs}." in text, text
        minutes.append(int(text.split(" minutes with")[0].split()[-1]))
    assert abs(minutes[0] - 2 * minutes[1]) <= 1 < 1000 < minutes[0] and not list(
        tmp_path.iterdir()
    )


def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which everything takes a second."""
    ticks = itertools.count()
    clock = SimpleNamespace(process_time=lambda: next(ticks), perf_counter=lambda: next(ticks))
    monkeypatch.setattr(estimate_others, "time", clock)


@pytest.mark.parametrize("arm", ["AdamW", "gauge-fixed AdamW", "linear model"])
def test_a_few_steps_say_how_long_a_run_of_the_contest_takes(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticking(monkeypatch)
    _, valid, test = TASKS["CNN"][1]("embedded")
    # prepared and warmed up, 60 steps, all examples
    evaluated = (2 * len(valid) + len(test)) / min(1000, len(valid))
    assert seconds_of_run(Run("CNN", "default", arm, 1e-3, 0, steps=60)) == pytest.approx(
        2 + 60 + evaluated
    )


# experiments with data whose digests are not known
UNCHECKED = ("image", "translation")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", ["embedded", "fetched", "full"])
def test_every_experiment_and_scale_has_an_estimate_or_is_refused_in_a_sentence(
    name: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetched data need not be there, and small files stand in for the papers'."""
    data = tmp_path / "data"
    data.mkdir()
    stand_in(data)
    monkeypatch.chdir(tmp_path)
    for one in ("estimate.seconds_of", "estimate_others.seconds_of_run"):
        monkeypatch.setattr(f"pathspace.training.experiments.reproduce.{one}", lambda _: 60.0)
    monkeypatch.setattr(
        "pathspace.training.experiments.reproduce.trial.data_digest", lambda *_: "data"
    )
    monkeypatch.setattr(estimate_others, "CASES", estimate_others.CASES[:1])
    shrink = 1 if scale == "full" else 5000
    words = ["--scale", scale, "--data", data, "--shrink", shrink, "--dry-run"]
    result = call("reproduce", name, *words)
    one = EXPERIMENTS[name]
    if {"embedded": True, "fetched": one.fetched, "full": bool(one.needs)}[scale]:
        assert result.exit_code == 0 and "minutes" in result.output, result.output
        if scale == "full" and one.trials:
            _, differs = flat(result.output).split("Differences from the paper: Data: ")
            assert ("no digests" if name in UNCHECKED else "not recognised") in differs[:70]
        else:
            assert "Differences" not in result.output
        return
    what = "setting for fetched data" if scale == "fetched" else "paper's own setting"
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert f"Experiment '{name}' has no {what}; leave out --scale" in flat(result.stderr)


# ---- times and toys ------------------------------------------------------------------------------


def test_every_experiment_has_an_estimate() -> None:
    assert set(OTHERS) == {name for name, one in EXPERIMENTS.items() if not one.trials}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy", "ideal-direction"])
def test_a_few_steps_say_how_long_toys_take(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as clocked:
        ticking(clocked)
        found = OTHERS[name](Setting(run=lambda _: [], shrink=10))
    # the timed steps take a second, and for toys so does each look
    timed = found.missing / TOY_STEPS
    looks = 0 if name == "ideal-direction" else 2 * (min(1000, toys.LOOKS) + 3)
    assert found.seconds == pytest.approx(timed + looks)
    # a tenth of the steps takes a part of the time
    assert found.missing == (2000 if name == "toy" else 1000)
    monkeypatch.chdir(tmp_path)
    result = call("reproduce", name, "--dry-run", "--shrink", 100)
    assert f"'{name}' takes about" in flat(result.output), result.output
    assert not list(tmp_path.iterdir())


def test_rounds_of_times_follow_from_the_spread_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = [1.0 + 0.08 * math.cos(3.7 * i) for i in range(4000)]
    sequence = iter(ratios)
    contenders = {"SGD": lambda: 1.0, "G-SGD": lambda: next(sequence)}
    took = len(alternate(contenders)["SGD"])
    few = {"SGD": [1.0] * 40, "G-SGD": ratios[:40]}
    assert LEAST < took < MOST and took / 1.5 < rounds_needed(few) < 1.5 * took
    assert rounds_needed({"SGD": [1.0] * 3, "G-SGD": [1.1] * 3}) == LEAST
    monkeypatch.setattr(estimate_others, "CASES", estimate_others.CASES[:1])
    found = OTHERS["time"](Setting(run=lambda _: [], shrink=200))
    (part,) = found.parts
    # and one as a warm-up
    assert 1 + LEAST <= part.count <= 11 and found.seconds > 0
