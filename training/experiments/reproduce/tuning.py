"""The protocol of all arms: rates chosen with tuning seeds, tests with fresh ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pathspace.diagnostics.shared.tables import plain
from pathspace.diagnostics.shared.wording import plural

from ..intervals import Interval, t_interval
from ..names import texts
from .baselines import SHOWN, baselines
from .holm import POWER, Claim, Grid, gain, judge, over_items, seeds_for_margin
from .markdown import sentences
from .record import Record, percent
from .trial import Outcome, Trial, task_data

# The seeds that are reported, and the ones that choose learning rates.
SEEDS = (0, 1, 2, 3, 4)
TUNING_SEEDS = (1000, 1001)


def fresh_seeds(count: int) -> tuple[int, ...]:
    """Return the first so many seeds that choose no learning rate."""
    return tuple(seed for seed in range(count + len(TUNING_SEEDS)) if seed not in TUNING_SEEDS)[
        :count
    ]


@dataclass(frozen=True)
class Setting:
    """The setting of an experiment.

    ``run`` returns the outcomes of trials. ``scale`` is ``embedded``, ``fetched``, or ``full`` for
    the paper's own setting, with its data in the folder ``data``. With ``by_power`` the spread of
    the first ``seeds`` says how many are reported, at most ``most_seeds``. Budgets are divided by
    ``shrink``, for tests. ``bars`` maps a task and its options to what simple means reach on its
    test split.
    """

    run: Callable[[Sequence[Any]], list[Any]]
    scale: str = "embedded"
    data: Path | None = None
    seeds: tuple[int, ...] = SEEDS
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    shrink: int = 1
    device: str = "cpu"
    by_power: bool = False
    most_seeds: int | None = None
    bars: Callable[[str, tuple[tuple[str, Any], ...]], dict[str, float]] = baselines

    def budget(self, number: int) -> int:
        """Return a number of epochs or steps, shrunk for tests."""
        return max(1, number // self.shrink)

    def placed(self, trial: Any) -> Any:
        """Return a trial on the device of this setting; runs of the contest have none."""
        return replace(trial, device=self.device) if isinstance(trial, Trial) else trial

    @property
    def protocol(self) -> tuple[str, ...]:
        """Describe the choice of learning rates."""
        seeds = plural(len(self.tuning_seeds), "tuning seed")
        return sentences("arms", setting=self, seeds=seeds, power=percent(POWER))


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper, as ``experiments.toml`` describes it: ``needs`` is what the
    full scale expects in ``--data``, empty where there is none, and ``full_seeds`` are the paper's.
    Without ``trials`` there is no journal, unless it has a name.
    """

    name: str
    needs: str
    run: Callable[[Setting], Record]
    draw: Callable[[Record], Figure]
    seeds: int = 5
    full_seeds: int | None = None
    fetched: bool = False
    trials: bool = True
    journal: str = ""


def experiment(
    name: str, run: Callable[[Setting], Record], draw: Callable[[Record], Figure]
) -> Experiment:
    """Return the experiment of this name."""
    entry = texts()[name]
    known = {key: value for key, value in entry.items() if key in Experiment.__dataclass_fields__}
    usual = {"needs": "", "fetched": "fetched" in entry.get("runs", {})}
    return Experiment(name=name, run=run, draw=draw, **{**usual, **known})


Runner = Callable[[Sequence[Trial]], list[Outcome]]


@dataclass(frozen=True)
class Arm:
    """One contender: its run, but for what the protocol sets, and its rates and weight decays."""

    label: str
    base: Trial
    rates: tuple[float, ...]
    decays: tuple[float, ...] = ()

    @property
    def bases(self) -> tuple[Trial, ...]:
        """The runs it chooses from but for their rates."""
        return tuple(replace(self.base, decay=decay) for decay in self.decays) or (self.base,)


@dataclass(frozen=True)
class Measured:
    """An arm with its chosen rate and decay, each rate's validation metric, and fresh outcomes."""

    arm: Arm
    lr: float
    tuning: dict[float, float]
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def tests(self) -> list[float]:
        """Test metric per fresh seed, NaN for one that diverged."""
        return [
            math.nan if outcome.test_metric is None else outcome.test_metric
            for outcome in self.outcomes
        ]

    @property
    def parts(self) -> list[tuple[float, ...]]:
        """Test metric of each part of the test split, per seed; empty for one that diverged."""
        return [outcome.test_parts for outcome in self.outcomes]

    @property
    def interval(self) -> Interval:
        """Mean of the test metric with its 95 % interval, diverged seeds left out."""
        return t_interval([value for value in self.tests if math.isfinite(value)])

    @property
    def edge(self) -> bool:
        """Whether the chosen rate is the smallest or largest on offer."""
        return self.lr in (min(self.arm.rates), max(self.arm.rates))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, curves included."""
        return {
            "label": self.arm.label,
            "task": self.arm.base.task,
            "tau": self.arm.base.tau,
            "rates": list(self.arm.rates),
            **({"decay": self.arm.base.decay} if self.arm.decays else {}),
            "lr": self.lr,
            "at_edge": self.edge,
            "tuning": plain(list(self.tuning.items())),
            "tests": plain(self.tests),
            **({"test_parts": _lines(self.parts)} if any(self.parts) else {}),
            "mean": plain(self.interval.mean),
            "half_width": plain(self.interval.half_width),
            "valid_metrics": _lines(outcome.valid_metrics for outcome in self.outcomes),
            "train_losses": _lines(outcome.train_losses for outcome in self.outcomes),
            "efficiencies": _lines(outcome.efficiencies for outcome in self.outcomes),
            "seconds": self.seconds,
        }


def measure(
    arms: Sequence[Arm], run: Runner, tuning_seeds: Sequence[int], seeds: Sequence[int]
) -> list[Measured]:
    """Tune all arms with some seeds, and test them with others."""
    assert not set(tuning_seeds) & set(seeds), "fresh seeds must have no part in the tuning"
    grid = [
        (base, rate, seed)
        for arm in arms
        for base in arm.bases
        for rate in arm.rates
        for seed in tuning_seeds
    ]
    # Only what is reported is measured more closely.
    tuned = iter(
        run([replace(base, lr=rate, seed=seed, efficiency=False) for base, rate, seed in grid])
    )
    chosen = []
    for arm in arms:
        tables, seconds = [], 0.0
        for _ in arm.bases:
            table = {}
            for rate in arm.rates:
                here = [next(tuned) for _ in tuning_seeds]
                table[rate] = math.nan if any(o.diverged for o in here) else merit(here)
                seconds += sum(o.seconds for o in here)
            tables.append(table)
        best = int(best_rate({float(i): one[best_rate(one)] for i, one in enumerate(tables)}))
        arm = replace(arm, base=arm.bases[best])
        chosen.append((arm, best_rate(tables[best]), tables[best], seconds))
    fresh = [
        replace(arm.base, lr=lr, seed=seed, test=True) for arm, lr, *_ in chosen for seed in seeds
    ]
    outcomes = iter(run(fresh))
    measured = []
    for arm, lr, table, seconds in chosen:
        mine = tuple(next(outcomes) for _ in seeds)
        measured.append(Measured(arm, lr, table, mine, seconds + sum(o.seconds for o in mine)))
    return measured


def measure_enough(
    arms: Sequence[Arm], setting: Setting, claims_of: Callable[[list[Measured]], Sequence[Claim]]
) -> tuple[list[Measured], tuple[Claim, ...]]:
    """Tune and test all arms with as many seeds as their claims need, and judge the claims: the
    spread of the setting's seeds says how many more decide each claim with a probability of 80 %.
    """
    measured = measure(arms, setting.run, setting.tuning_seeds, setting.seeds)
    claims = judge(claims_of(measured))
    needed = max((seeds_for_margin(claim, len(claims)) or 0 for claim in claims), default=0)
    if setting.most_seeds is not None:
        needed = min(needed, setting.most_seeds)
    if setting.by_power and needed > len(setting.seeds):
        measured = measure(arms, setting.run, setting.tuning_seeds, fresh_seeds(needed))
        claims = judge(claims_of(measured))
    return measured, claims


def versus(
    statement: str,
    ours: Measured,
    rival: Measured,
    printed: tuple[float, float] | None = None,
    bars: Mapping[str, float] | None = None,
) -> Claim:
    """Test the claim "this arm's test metric is lower than that one's".

    A run that diverged counts with the metric that the task calls hopeless. An arm that is no
    better than one of ``bars`` (simple means, published networks) decides nothing.
    """
    whole = math.isfinite(sum(ours.tests) + sum(rival.tests))
    failed = math.nan if whole else task_data(ours.arm.base.task, ours.arm.base.options).hopeless
    claim = gain(statement, ours.tests, rival.tests, printed, failed)
    claim = over_items(claim, _shares(ours, rival, failed))
    for name, bar in (bars or {}).items():
        for arm in (ours, rival):
            values = [failed if math.isnan(value) else value for value in arm.tests]
            if values and not float(np.mean(values)) < bar and not name.startswith(SHOWN):
                claim = replace(claim, nothing=f"{arm.arm.label} does not beat {name}")
    return claim


def _shares(ours: Measured, rival: Measured, failed: float) -> Grid:
    """The rival's metric minus ours, per seed and part of the test split, as shares."""
    count = max((len(parts) for parts in (*ours.parts, *rival.parts)), default=0)
    first, second = (
        np.array(
            [o.test_parts or (failed if o.diverged else math.nan,) * count for o in m.outcomes]
        )
        for m in (ours, rival)
    )
    scale = abs(float(second.mean())) if second.size else 0.0
    difference: Grid = second - first
    return difference / scale if scale else difference


def merit(outcomes: Sequence[Outcome]) -> float:
    """Return the mean over runs of the validation metric at the last epoch."""
    return float(np.mean([outcome.valid_metrics[-1] for outcome in outcomes]))


def best_rate(table: dict[float, float]) -> float:
    """Return the rate with the lowest value; ties go to the smaller, NaN comes last."""
    return min(table, key=lambda rate: (math.isnan(table[rate]), table[rate], rate))


def _lines(curves: Iterable[Sequence[float]]) -> list[list[float | None]]:
    """Return numbers with five digits, ``None`` for one that is not finite."""
    return [[float(f"{v:.5g}") if math.isfinite(v) else None for v in curve] for curve in curves]
