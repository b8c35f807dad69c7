"""``pathspace reproduce NAME --dry-run``: which runs are missing, and how many seeds their spread
asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from recipe_meters import stand_in
from training_command import call, flat

from pathspace.training.experiments.reproduce import EXPERIMENTS, Setting
from pathspace.training.experiments.reproduce.dry_run import planned
from pathspace.training.experiments.reproduce.experiment import TUNING_SEEDS, fresh_seeds
from pathspace.training.experiments.reproduce.trial import Outcome, Trial
from pathspace.training.experiments.reproduce.tuning import Arm, measure_enough, versus

RACE = EXPERIMENTS["race"]


def outcome(trial: Trial, wide: float = 0.0) -> Outcome:
    """The largest rate is the best; errors of seeds differ by a share of the mean."""
    test = 0.2 * (1 + wide * math.cos(5 * trial.seed + len(trial.optimizer)))
    return Outcome((1.0,), (1.0,), (1 / trial.lr,), 60.0, False, test, test, (test, test))


def test_known_runs_choose_the_rates() -> None:
    setting = Setting(run=lambda _: [], shrink=30)
    tuned = [trial for trial in planned(RACE, setting)[0] if trial.seed in TUNING_SEEDS]
    fresh = [trial for trial in planned(RACE, setting, outcome)[0] if trial.test]
    for init in ("default", "unit-skeleton"):
        for optimizer in ("sgd", "gsgd"):
            mine = [
                {trial.lr for trial in some if (trial.init, trial.optimizer) == (init, optimizer)}
                for some in (tuned, fresh)
            ]
            assert mine[1] == {max(mine[0])}


def test_the_unknown_is_no_ones_choice() -> None:
    unknown = Trial("digits-rows", "sgd", 0.1, 0, 1).unknown
    assert unknown.valid_metrics == (math.inf,) and not unknown.diverged


@pytest.mark.parametrize("most", [None, 20])
def test_known_seeds_say_how_many_others_there_will_be(most: int | None) -> None:
    setting = Setting(run=lambda _: [], by_power=True, shrink=30, most_seeds=most)
    assert len({trial.seed for trial in planned(RACE, setting)[0] if trial.test}) == 5
    asked, _ = planned(RACE, setting, lambda trial: outcome(trial, 0.2))
    seeds = len({trial.seed for trial in asked if trial.test})
    assert seeds == most if most else seeds > 100


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


# ---- every experiment ----------------------------------------------------------------------------

# experiments with data whose digests are not known
UNCHECKED = ("image", "translation")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", ["embedded", "fetched", "full"])
def test_every_experiment_and_scale_is_counted_or_refused_in_a_sentence(
    name: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetched data need not be there, and small files stand in for the papers'."""
    data = tmp_path / "data"
    data.mkdir()
    stand_in(data)
    monkeypatch.chdir(tmp_path)
    for digest in ("trial.data_digest", "leaderboard_run.run_data"):
        monkeypatch.setattr(f"pathspace.training.experiments.reproduce.{digest}", lambda *_: "data")
    shrink = 1 if scale == "full" else 5000
    words = ["--scale", scale, "--data", data, "--shrink", shrink, "--dry-run"]
    result = call("reproduce", name, *words)
    one = EXPERIMENTS[name]
    if {"embedded": True, "fetched": one.fetched, "full": bool(one.needs)}[scale]:
        assert result.exit_code == 0, result.output
        told = "0 are known." if one.trials or one.journal else "one piece of work"
        assert told in flat(result.output)
        if scale == "full" and one.trials:
            _, differs = flat(result.output).split("Differences from the paper: Data: ")
            assert ("no digests" if name in UNCHECKED else "not recognised") in differs[:70]
        else:
            assert "Differences" not in result.output
        return
    what = "setting for fetched data" if scale == "fetched" else "paper's own setting"
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert f"Experiment '{name}' has no {what}; leave out --scale" in flat(result.stderr)
