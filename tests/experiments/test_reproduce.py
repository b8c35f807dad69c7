"""``pathspace reproduce``: the protocol, the verdicts, the records and the page."""

from __future__ import annotations

import inspect
import json
import math
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from recipe_meters import stand_in
from scipy import stats
from sklearn.linear_model import LogisticRegression
from training_command import call, flat

from pathspace.errors import InputError
from pathspace.training.experiments.intervals import t_interval
from pathspace.training.experiments.json_lines import read_lines
from pathspace.training.experiments.models import Toy
from pathspace.training.experiments.recipe import optimizer_kind
from pathspace.training.experiments.reproduce import EXPERIMENTS, Setting
from pathspace.training.experiments.reproduce.baselines import baselines
from pathspace.training.experiments.reproduce.command import records, trial_of, up_to_date
from pathspace.training.experiments.reproduce.holm import (
    LEVEL,
    POWER,
    Claim,
    Verdict,
    gain,
    holm,
    judge,
    over_items,
    positive,
    seeds_needed,
)
from pathspace.training.experiments.reproduce.page import render
from pathspace.training.experiments.reproduce.record import Record, Table, judged, judged_again
from pathspace.training.experiments.reproduce.timing import LEAST, PRECISION, alternate
from pathspace.training.experiments.reproduce.toys import Net, target, train_toys
from pathspace.training.experiments.reproduce.trial import (
    PARTS,
    Outcome,
    Trial,
    data_digest,
    run_trial,
)
from pathspace.training.experiments.reproduce.trial_cache import TrialCache, run_all
from pathspace.training.experiments.reproduce.tuning import (
    TUNING_SEEDS,
    Arm,
    Measured,
    best_rate,
    fresh_seeds,
    measure,
    measure_enough,
    versus,
)
from pathspace.training.experiments.run_folder import CHECKPOINT_SECONDS, LAST
from pathspace.training.experiments.task import _BUILDERS, Split, Task, load_task
from pathspace.training.penal import penalise_
from tests.training.test_training_data import write_mnist

SMALL = Trial("digits-rows", "sgd", 0.1, 0, 2, batch_size=400, options=(("hidden", 3),))
DOCS = Path(__file__).parents[2] / "docs"


def same(first: Outcome, second: Outcome) -> bool:
    return replace(first, seconds=0.0) == replace(second, seconds=0.0)


# ---- trials and the journal ----------------------------------------------------------------------


def test_a_trial_repeats_itself_and_looks_at_the_test_split_only_when_told() -> None:
    first, second = run_trial(SMALL), run_trial(SMALL)
    assert same(first, second) and first.test_metric is None and len(first.valid_metrics) == 2
    looked = run_trial(replace(SMALL, test=True))
    assert looked.test_metric is not None and not first.test_parts
    # 360 test images in 20 parts of 18
    assert len(looked.test_parts) == PARTS == 20 and np.mean(looked.test_parts) == pytest.approx(
        looked.test_metric
    )
    assert Outcome.from_dict(json.loads(json.dumps(asdict(looked)))) == looked


def test_every_field_of_a_trial_is_in_its_name() -> None:
    others = {
        "task": "digits-rows-permuted", "optimizer": "x", "lr": 9.0, "seed": 9, "epochs": 9,
        "batch_size": 9, "init": "default", "rule": "random", "tau": 9.0, "options": (),
        "test": True, "efficiency": True, "device": "cuda", "schedule": "linear", "clip": 1.0,
        "decay": 0.1, "augment": "crop-flip", "betas": (0.9, 0.98), "eps": 1e-9,
    }  # fmt: skip
    changed = [replace(SMALL, **{key: value}) for key, value in others.items()]  # type: ignore[arg-type]
    assert len({trial.key for trial in (SMALL, *changed)}) == len(fields(Trial)) + 1 == 20


def test_a_known_trial_is_not_run_again_and_a_damaged_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of earlier code, which says what computed it."""
    folder = "pathspace.training.experiments.reproduce"
    monkeypatch.setattr(f"{folder}.trial_cache.provenance", lambda: {"commit": "earlier"})
    (first,) = run_all([SMALL], TrialCache(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(f"{folder}.trial.run_trial", lambda *_: pytest.fail("run again"))
    again = TrialCache(tmp_path)
    assert run_all([SMALL, SMALL], again) == [first, first]
    assert again.origins == [{"commit": "earlier"}]
    monkeypatch.undo()
    (file,) = tmp_path.iterdir()
    for text in ("", "{", "[]", '{"format": 99}', '{"format": 3, "outcome": {"strange": 1}}'):
        file.write_text(text)
        assert TrialCache(tmp_path).find(SMALL) is None
    (other,) = run_all([SMALL], TrialCache(tmp_path))
    assert same(first, other) and TrialCache(tmp_path).find(SMALL) == other


@pytest.mark.slow
def test_two_processes_find_what_one_finds_and_one_that_is_killed_ends_in_a_sentence(
    tmp_path: Path,
) -> None:
    # the other process may have ended its trial as well when the first outcome is seen, not all
    trials = [replace(SMALL, seed=seed, epochs=40) for seed in range(4)]
    journal = tmp_path / "journal.jsonl"

    def kill_one(trial: Trial) -> None:
        victim = multiprocessing.active_children()[0]
        victim.kill()
        victim.join()

    with pytest.raises(InputError, match=r"killed during a trial, .* same command goes on"):
        run_all(trials, TrialCache(tmp_path, journal), 2, kill_one)
    assert 0 < len(journal.read_text().splitlines()) < 4 and not multiprocessing.active_children()
    apart = run_all(trials, TrialCache(tmp_path, journal), 2)
    alone = run_all(trials, TrialCache(None))
    assert all(same(a, b) for a, b in zip(apart, alone, strict=True))
    # every trial has its line; a line that was cut off costs its trial only
    text = journal.read_text()
    journal.write_text(text + text[:100])
    known = TrialCache(tmp_path / "empty", journal)
    assert [known.find(trial) for trial in trials] == apart and len(text.splitlines()) == 4
    assert [TrialCache(None, journal).find(trial) for trial in trials] == apart
    record = json.loads(text.splitlines()[0])
    assert record["data"] == data_digest(SMALL.task, SMALL.options)
    assert record["provenance"]["commit"] and record["provenance"]["processor"]
    # the trial after it is kept
    short = replace(SMALL, seed=9)
    run_all([short], TrialCache(tmp_path, journal))
    assert TrialCache(tmp_path / "empty", journal).find(short) is not None


@pytest.mark.slow
def test_two_commands_in_one_folder_run_each_trial_once(tmp_path: Path) -> None:
    trials = [replace(SMALL, seed=seed) for seed in range(4)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        both = [pool.submit(run_all, trials, TrialCache(tmp_path)) for _ in range(2)]
        first, second = (one.result() for one in both)
    # (to the second that each took)
    assert first == second and len(list(tmp_path.iterdir())) == 4


LONG = """
import sys
from pathlib import Path
from pathspace.training.experiments import run_folder
from pathspace.training.experiments.reproduce import trial
run_folder.CHECKPOINT_SECONDS = 0.05
trial.run_trial(trial.Trial("number-words", "adam", 0.01, 0, 3, batch_size=8, options=(("hidden", 8), ("limit", 64)),
    efficiency=True, schedule="linear", clip=1.0, test=True), Path(sys.argv[1]))
"""  # noqa: E501


@pytest.mark.slow
def test_a_trial_that_is_killed_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    trial = Trial(
        "number-words", "adam", 0.01, 0, 3, batch_size=8, options=(("hidden", 8), ("limit", 64))
    )
    trial = replace(trial, efficiency=True, schedule="linear", clip=1.0, test=True)
    process = subprocess.Popen([sys.executable, "-c", LONG, tmp_path])
    while process.poll() is None and not (tmp_path / LAST).is_file():
        time.sleep(0.001)
    process.kill()
    process.wait()
    done = torch.load(tmp_path / LAST)
    assert 0 < done["global_step"] <= 24 and CHECKPOINT_SECONDS <= 60
    assert same(run_trial(trial, tmp_path), run_trial(trial))


def test_other_labels_make_another_trial_and_the_place_of_data_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels = {"first": 1, "second": 1, "third": 2}

    def build(data: str) -> Task:
        task = load_task("digits-rows", hidden=3)
        return replace(
            task, train=Split(task.train.inputs, (task.train.targets * labels[data]) % 10)
        )

    monkeypatch.setitem(_BUILDERS, "labelled", build)
    first, second, third = (
        Trial("labelled", "sgd", 0.1, 0, 1, options=(("data", name),)).key for name in labels
    )
    assert first == second != third


def test_efficiency_is_measured_before_training_and_after_every_epoch() -> None:
    options = (("hidden", 8), ("limit", 8))
    trial = Trial(
        "number-words", "adam", 0.01, 0, 2, batch_size=8, options=options, efficiency=True
    )
    plain, penal = run_trial(trial), run_trial(replace(trial, tau=1.0))
    assert len(plain.efficiencies) == len(penal.efficiencies) == 3
    # Before training there is no difference: the penalty is kept out of the gradient
    # that cosines are taken with.
    assert plain.efficiencies[0] == pytest.approx(penal.efficiencies[0], abs=1e-12)
    assert plain.efficiencies[2] != penal.efficiencies[2]
    # Looking changes nothing.
    assert plain.valid_losses == run_trial(replace(trial, efficiency=False)).valid_losses


@pytest.mark.parametrize(
    "journal", sorted((DOCS / "reproduction").glob("*-trials.jsonl")), ids=lambda path: path.stem
)
def test_runs_in_committed_journals_are_known_by_their_settings_and_their_data(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the data of that time; a new field of a trial must not change the names of others. Of
    several runs of one trial, the last is known, and the record reports it.
    """
    cache, lines = TrialCache(None, journal), list(read_lines(journal))
    last = {line["key"]: line for line in lines}
    for line in lines:
        monkeypatch.setattr(
            "pathspace.training.experiments.reproduce.trial.data_digest",
            lambda *_, data=line["data"]: data,
        )
        trial = trial_of(line["trial"])
        assert trial.key == line["key"] and cache.record(trial) == last[trial.key]
    record = Record.read(journal.with_name(journal.name.replace("-trials.jsonl", ".json")))
    tested = {line["outcome"]["test_metric"] for line in last.values()}
    assert all(tested.issuperset(arm["tests"]) for arm in record.data["arms"])


# ---- tuning --------------------------------------------------------------------------------------


def outcome(value: float, trial: Trial) -> Outcome:
    return Outcome(
        (value,), (value,), (value,), 1.0, False, value, value if trial.test else None, (0.0, 0.1)
    )


def test_rates_are_chosen_by_validation_and_reported_on_other_seeds() -> None:
    asked: list[Trial] = []

    def run(trials: Sequence[Trial]) -> list[Outcome]:
        asked.extend(trials)
        return [outcome(abs(t.lr - 0.2) + 0.001 * t.seed, t) for t in trials]

    (only,) = measure([Arm("a", SMALL, (0.1, 0.2, 0.4))], run, (7, 8), (0, 1, 2))
    assert only.lr == 0.2 and not only.edge and only.tests == pytest.approx([0.0, 0.001, 0.002])
    tuning, fresh = asked[:6], asked[6:]
    assert not any(t.test for t in tuning) and {t.seed for t in tuning} == {7, 8}
    assert all(t.test and t.lr == 0.2 for t in fresh) and [t.seed for t in fresh] == [0, 1, 2]
    assert only.seconds == 9.0
    # a rate at which a seed diverged is the last choice
    assert best_rate({0.1: 0.9, 0.2: math.nan}) == best_rate({0.2: 0.5, 0.1: 0.5}) == 0.1
    many = fresh_seeds(1500)
    assert len(set(many)) == 1500 and not set(many) & set(TUNING_SEEDS)


# ---- verdicts ------------------------------------------------------------------------------------


def test_gain_is_the_paired_t_test_on_shares() -> None:
    rng = np.random.default_rng(0)
    ours, rival = rng.random(6).tolist(), (rng.random(6) + 0.3).tolist()
    claim = gain("x", ours, rival, (1.5, 2.0))
    assert claim.p == pytest.approx(stats.ttest_rel(rival, ours).pvalue)
    interval = stats.ttest_rel(rival, ours).confidence_interval(0.95)
    assert (claim.low, claim.high) == pytest.approx(tuple(np.array(interval) / np.mean(rival)))
    assert claim.mean == pytest.approx(1 - np.mean(ours) / np.mean(rival)) and claim.printed == 0.25
    # a seed that failed counts against its arm
    failed, lost = (gain("x", [1.0, v], [2.0, 2.2], failed=3.0) for v in (math.nan, 3.0))
    assert (failed.mean, failed.p, failed.count) == (lost.mean, lost.p, lost.count)


@pytest.mark.parametrize("ours", [True, False])
def test_an_arm_that_fails_more_often_is_never_the_better_one(ours: bool) -> None:
    good, bad = [0.1, 0.11, 0.1, math.nan, 0.1, 0.11] * 5, [0.9, 0.91, 0.9, 0.92, 0.9, 0.9] * 5
    (claim,) = judge([gain("x", good, bad) if ours else gain("x", bad, good)])
    assert claim.verdict == "undecided" and "failed more often" in claim.nothing
    (sound,) = judge([gain("x", [0.1 if math.isnan(v) else v for v in good], bad)])
    assert sound.verdict == "better"


def test_correction_is_holms() -> None:
    # by hand: 0.005 * 4, 0.01 * 3, 0.03 * 2, then 0.04 * 1 lifted to the one before it
    assert holm([0.04, 0.01, 0.03, 0.005]) == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert holm([0.9, math.nan]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("values", "printed", "verdict"),
    [
        ([0.10, 0.11, 0.09, 0.10, 0.10], None, "better"),
        ([0.10, 0.11, 0.09, 0.10, 0.10], 0.5, "better"),
        ([-0.10, -0.11, -0.09, -0.10, -0.10], None, "worse"),
        ([0.01, -0.01, 0.0, 0.005, -0.005], 0.2, "no difference that matters"),
        ([0.01, -0.01, 0.0, 0.005, -0.005], None, "no difference that matters"),
        ([0.01, -0.01, 0.0, 0.005, -0.005], 0.005, "undecided"),
        ([1.0, -1.0, 0.2, -0.1, 0.0], 0.2, "undecided"),
        ([0.0, 0.0, 0.0], None, "no difference that matters"),
        ([0.1, 0.1, 0.1], 0.5, "better"),
        ([0.1], None, "undecided"),
        ([], None, "undecided"),
    ],
)
def test_rule_of_the_verdict(values: list[float], printed: float | None, verdict: str) -> None:
    (claim,) = judge([positive("x", values, printed)])
    assert claim.verdict == verdict
    again = judge([Claim.from_dict(judged([claim])[0])])[0]
    assert (again.verdict, again.needed) == (claim.verdict, claim.needed)


def test_the_interval_for_other_items_follows_the_parts_of_the_variance() -> None:
    """Oracle: the variances of a two-way layout, term by term."""
    values = np.random.default_rng(4).normal(0.1, 0.05, (4, 6))
    claim = over_items(positive("x", values.mean(1).tolist()), values)
    mean, seeds = sum(values.ravel()) / 24, [sum(row) / 6 for row in values]
    parts = [sum(column) / 4 for column in values.T]
    rest = (
        sum((values[s, k] - seeds[s] - parts[k] + mean) ** 2 for s in range(4) for k in range(6))
        / 15
    )
    of_seeds, of_parts = (
        sum((v - mean) ** 2 for v in group) / (len(group) - 1) for group in (seeds, parts)
    )
    error = math.sqrt(of_seeds / 4 + max(0, of_parts / 6 - rest / 24))
    half = stats.t.ppf(0.975, 3) * error
    assert (claim.items_low, claim.items_high) == pytest.approx(
        (claim.mean - half, claim.mean + half)
    )
    # equal parts add nothing, and without parts there is no such interval
    plain = positive("x", [0.1, 0.2, 0.4])
    alike = over_items(plain, np.repeat([[0.1], [0.2], [0.4]], 5, axis=1))
    assert (alike.items_low, alike.items_high) == pytest.approx((plain.low, plain.high))
    for none in (np.zeros((3, 0)), np.full((3, 4), math.nan), np.zeros((0,))):
        assert over_items(plain, none) == plain


def test_a_verdict_that_other_items_may_change_has_both_intervals() -> None:
    seed, part = np.arange(5.0)[:, None] / 100, np.arange(-9.5, 10) / 10
    tests = {"ours": 0.2 + seed + part / 100, "rival": 0.3 + seed + part / 2}
    tests["rival"][0] += 0.01

    def measured(name: str) -> Measured:
        outcomes = (
            Outcome((), (), (), 0.0, False, test_metric=row.mean(), test_parts=tuple(row))
            for row in tests[name]
        )
        return Measured(Arm(name, SMALL, (0.1,)), 0.1, {0.1: 0.2}, tuple(outcomes), 0.0)

    first, second = measured("ours"), measured("rival")
    (claim,) = judge([versus("ours errs less", first, second)])
    (alone,) = judge([gain("ours errs less", first.tests, second.tests)])
    assert claim.verdict == alone.verdict == "better" and claim.low == alone.low
    assert claim.items_low < 0 < claim.low
    record = replace(Record.read(DOCS / "reproduction" / "race.json"), claims=judged([claim]))
    assert "**better**, on these test items" in render([record])


def test_two_tests_are_those_of_scipy() -> None:
    """Oracle: scipy's one-sample t-test against zero and against either bound."""
    values = np.random.default_rng(3).normal(0.02, 0.05, 9).tolist()
    (claim,) = judge([positive("x", values, 0.06)])
    bounds = [
        stats.ttest_1samp(values, -0.06, alternative="greater"),
        stats.ttest_1samp(values, 0.06, alternative="less"),
    ]
    assert claim.corrected == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert claim.equivalence == pytest.approx(max(bound.pvalue for bound in bounds))


REPEATED = 200


@pytest.mark.slow
@pytest.mark.parametrize("claims", [1, 3])
@pytest.mark.parametrize("true", [0.0, 0.05, -0.05])
def test_shares_of_verdicts_are_those_that_the_power_promises(true: float, claims: int) -> None:
    """Simulated: experiments of so many claims whose effects are known, with as
    many seeds as are asked for.
    """
    rng, deviation, margin = np.random.default_rng(7), 0.06, 0.05
    n = seeds_needed(deviation, margin, claims)
    runs = [
        judge(
            [
                positive("x", values.tolist(), margin)
                for values in rng.normal(true, deviation, (claims, n))
            ]
        )
        for _ in range(REPEATED)
    ]
    right = {0.0: "no difference that matters", 0.05: "better", -0.05: "worse"}[true]
    # three standard errors of a share
    bound = 3 * math.sqrt(POWER * (1 - POWER) / REPEATED)
    assert np.mean([run[0].verdict == right for run in runs]) > POWER - bound
    wrong = (
        {"better", "worse"}
        if true == 0
        else {"no difference that matters", "worse" if true > 0 else "better"}
    )
    any_wrong = np.mean([any(claim.verdict in wrong for claim in run) for run in runs])
    assert any_wrong < LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / REPEATED)


@pytest.mark.parametrize("most", [None, 30])
def test_seeds_follow_from_the_spread_of_the_first(most: int | None) -> None:
    """Errors of seeds differ by half of the mean: more than a thousand decide, or the bound."""

    def run(trials: Sequence[Trial]) -> list[Outcome]:
        return [
            outcome(0.2 * (1 + 0.5 * math.cos(5 * t.seed + len(t.optimizer))), t) for t in trials
        ]

    def claims(found: list[Measured]) -> list[Claim]:
        return [versus("less", found[1], found[0], (0.98, 1.0))]

    arms = [Arm(name, replace(SMALL, optimizer=name), (0.1,)) for name in ("sgd", "gsgd")]
    setting = Setting(run=run, by_power=True, most_seeds=most)
    measured, (claim,) = measure_enough(arms, setting, claims)
    assert claim.count == len(measured[0].outcomes)
    assert claim.count == most if most else claim.count > 1100
    assert any(
        f"{POWER:.0%}, at most {most}".replace("%", " %", 1) in line for line in setting.protocol
    ) == (most is not None)
    fewer, _ = measure_enough(arms, replace(setting, by_power=False), claims)
    assert len(fewer[0].outcomes) == 5


def test_arms_that_simple_means_beat_decide_nothing() -> None:
    def run(trials: Sequence[Trial]) -> list[Outcome]:
        return [outcome(0.2 + 0.1 * (t.optimizer == "sgd") + 1e-3 * t.seed, t) for t in trials]

    arms = [Arm(name, replace(SMALL, optimizer=name), (0.1,)) for name in ("sgd", "gsgd")]
    first, second = measure(arms, run, (7,), (0, 1, 2))
    for bar, verdict in ((0.25, "undecided"), (0.5, "better")):
        (claim,) = judge([versus("x", second, first, None, {"table": bar})])
        assert claim.verdict == verdict and (
            verdict == "better" or claim.nothing == "sgd does not beat table"
        )


def test_simple_means_are_the_slow_obvious_ones() -> None:
    """Oracle: pairs of characters counted one by one; logistic regression of scikit-learn."""
    options = (("limit", 40),)
    task = load_task("text-characters", **dict(options))

    def pairs(split: Split) -> list[tuple[int, int]]:
        lines = split.inputs.flatten().tolist(), split.targets.flatten().tolist()
        return list(zip(*lines, strict=True))

    counts, size = Counter(pairs(task.train)), task.make_model(0)(task.test.inputs[:1]).shape[-1]
    rows = Counter(first for first, _ in pairs(task.train))
    bits = [-math.log2((counts[pair] + 1) / (rows[pair[0]] + size)) for pair in pairs(task.test)]
    assert baselines("text-characters", options)["bigram table"] == pytest.approx(
        np.mean(bits), 1e-4
    )
    digits = load_task("digits-rows")
    model = LogisticRegression(max_iter=1000).fit(
        digits.train.inputs.flatten(1), digits.train.targets
    )
    theirs = 1 - model.score(digits.test.inputs.flatten(1), digits.test.targets)
    assert abs(baselines("digits-rows", ())["logistic regression"] - theirs) < 0.03


# ---- the toys side by side -----------------------------------------------------------------------


@pytest.mark.parametrize(("skip", "tau"), [(1.0, 0.0), (1.0, 0.01), (0.0, 0.0)])
def test_toys_side_by_side_are_each_the_model_trained_alone(skip: float, tau: float) -> None:
    """Oracle: the module of the library, the penal connection of the library, torch's SGD."""
    nets = [Net(5, 1.0, 0.3, 0.01), Net(5, skip, tau, 0.1), Net(3, 0.0, 0.0, 0.2)]
    toys = train_toys(nets, steps=7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Toy(skip=bool(skip))
    if tau:
        penalise_(model, torch.zeros(2, 2), tau=tau)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = torch.rand(100, 64, 2, generator=torch.Generator().manual_seed(5)) * 2 - 1
    for batch in points[:7]:
        optimizer.zero_grad()
        (model(batch).squeeze(1) - target(batch)).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(toys.weights, model.parameters(), strict=True):
        assert torch.allclose(ours[1], theirs, atol=1e-6)


# ---- experiments, records, page ------------------------------------------------------------------

TRIALS = ["smnist", "language", "rcnn", "translation", "image", "depth", "regularisers"]


def pretend(trials: Sequence[Trial]) -> list[Outcome]:
    """Errors without training: path space a little better, everything else a little random."""
    for trial in trials:
        # What a real run would find out much later.
        assert {key for key, _ in trial.options} <= inspect.signature(
            _BUILDERS[trial.task]
        ).parameters.keys()
        optimizer_kind(trial.optimizer)
    rng = np.random.default_rng(0)
    return [
        outcome(0.1 + 0.01 * rng.random() - 0.02 * t.optimizer.startswith("g"), t) for t in trials
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["embedded", "full"])
@pytest.mark.parametrize("name", TRIALS)
def test_records_of_trained_experiments_hold_together(
    name: str, scale: str, tmp_path: Path
) -> None:
    if scale == "full" and not EXPERIMENTS[name].needs:
        pytest.skip("has no setting of a paper")
    data = stand_in(tmp_path) if scale == "full" else None
    setting = Setting(run=pretend, scale=scale, data=data, bars=lambda task, options: {})
    record = EXPERIMENTS[name].run(setting)
    record.write(tmp_path / "record.json")
    again = Record.read(tmp_path / "record.json")
    assert again.ours == record.ours and again.claims == record.claims and again.name == name
    assert render([again]) == render([record]) and EXPERIMENTS[name].draw(again).axes
    verdicts = {claim["statement"]: claim["verdict"] for claim in record.claims}
    assert {*verdicts.values()} <= {*get_args(Verdict)}
    if name == "translation":
        assert {said for what, said in verdicts.items() if "negative" in what} == {"worse"}
    if name == "smnist":
        better = {said for what, said in verdicts.items() if "G-SGD errs less than SGD" in what}
        assert better == {"better"}


def test_cells_without_data_are_left_out_and_named(tmp_path: Path) -> None:
    some, empty = tmp_path / "some", tmp_path / "empty"
    some.mkdir()
    empty.mkdir()
    write_mnist(some)
    setting = Setting(run=pretend, scale="full", data=some, bars=lambda task, options: {})
    record = EXPERIMENTS["rcnn"].run(setting)
    assert len(record.ours.rows) == 6
    left = [line for line in record.differs if line.startswith("Not trained (")]
    assert left and "CIFAR" in " ".join(left)
    with pytest.raises(InputError, match="can be trained here: "):
        EXPERIMENTS["rcnn"].run(replace(setting, data=empty))


@pytest.mark.parametrize("name", ["toy", "ideal-direction", "time"])
def test_records_of_measured_experiments_hold_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pathspace.training.experiments.reproduce.timing.CASES",
        EXPERIMENTS["time"].run.__globals__["CASES"][:1],
    )
    record = EXPERIMENTS[name].run(Setting(run=pretend, shrink=5000))
    assert record.claims and EXPERIMENTS[name].draw(record).axes and record.ours.rows


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_times_are_taken_in_turn_until_the_ratio_is_known_to_one_percent(noise: float) -> None:
    """By a clock of our own: the machine slows down in waves, both contenders
    alike, and each turn is noisy.
    """
    rng, turns = np.random.default_rng(1), []

    def turn(name: str, seconds: float) -> float:
        turns.append(name)
        wave = 2 + math.sin((len(turns) - 1) // 2 / 5)
        return float(seconds * wave * math.exp(noise * rng.normal()))

    times = alternate({"SGD": lambda: turn("SGD", 1e-3), "G-SGD": lambda: turn("G-SGD", 1.07e-3)})
    assert turns == ["SGD", "G-SGD"] * (len(times["SGD"]) + 1)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    found, before = t_interval(ratios), t_interval(ratios[:-1])
    assert found.half_width <= PRECISION * found.mean
    assert abs(found.mean / 1.07 / math.exp(noise**2) - 1) < 3 * PRECISION
    assert len(ratios) == LEAST if noise == 0 else before.half_width > PRECISION * before.mean
    few = alternate({"a": lambda: turn("a", 1.0), "b": lambda: turn("b", 9.0)}, most=3)
    assert len(few["b"]) == 3


def test_committed_page_is_what_its_records_say() -> None:
    known = records(DOCS / "reproduction")
    assert known and (DOCS / "reproduction.md").read_text(encoding="utf-8") == render(
        known, journals=DOCS / "reproduction"
    )
    assert all((DOCS / "reproduction" / f"{record.name}.png").is_file() for record in known)


@pytest.mark.slow
def test_a_shrunk_run_says_so_and_the_command_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("reproduce", "ideal-direction", "--shrink", 5000)
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in (tmp_path / "reproduction").iterdir()) == [
        "ideal-direction.json",
        "ideal-direction.png",
    ]
    page = (tmp_path / "reproduction.md").read_text()
    (tmp_path / "reproduction.md").unlink()
    assert call("reproduce", "page").exit_code == 0
    assert (tmp_path / "reproduction.md").read_text() == page and "## ideal-direction" in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("toy --scale fetched", "Experiment 'toy' has no --scale fetched"),
        ("table-9", "There is no experiment 'table-9'; choose one of: optimizers, race, smnist"),
        ("smnist --scale full", "needs MNIST's four idx files; give their folder with --data DIR"),
        ("depth --scale full --data nowhere", "There is no folder 'nowhere'"),
        ("race --most-seeds 9", "--most-seeds bounds the number of seeds"),
        ("toy --out /dev/null/x", "Cannot make the folder '/dev/null/x'"),
        ("page --out none", "There is no record in 'none' to write a page of"),
        ("page --out broken", "The file 'broken/toy.json' is not a record of an experiment"),
        ("smnist --device abacus", "cannot use the device 'abacus'"),
    ],
)
def test_bad_input_is_one_sentence(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "toy.json").write_text(json.dumps({"format": 1, "name": "toy"}))
    result = call("reproduce", *words.split())
    assert result.exit_code == 2 and sentence in flat(result.stderr)
    assert "Traceback" not in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"broken"}


@pytest.mark.parametrize("name", ["race", *TRIALS])
def test_what_records_say_of_their_runs_is_what_the_journals_say(name: str) -> None:
    """If this fails, run: pathspace reproduce page --out docs/reproduction."""
    record = Record.read(DOCS / "reproduction" / f"{name}.json")
    journal = DOCS / "reproduction" / f"{name}-trials.jsonl"
    # what was overlooked comes back, from the journal alone
    rows = (*record.ours.rows, ("published: ours", *"–––"))
    old = replace(record, differs=record.differs[1:], ours=Table(record.ours.columns, rows))
    assert judged_again(up_to_date(old, EXPERIMENTS[name], journal)) == record
    # a record of other runs stays
    told = record.data["arms"]
    others = [told[0] | {"tests": [0.5] * len(told[0]["tests"])}, *told[1:]]
    other = replace(old, data=record.data | {"arms": others})
    assert up_to_date(other, EXPERIMENTS[name], journal) is other


def test_runs_are_handed_to_the_device() -> None:
    setting = Setting(run=pretend, device="cuda")
    assert setting.placed(SMALL).device == "cuda"
    differs = EXPERIMENTS["race"].run(replace(setting, bars=lambda task, options: {})).differs
    assert any(line.startswith("Computer: cuda in place of ") for line in differs)
