"""Estimates of how long experiments take that are made of trials: which runs are missing, and how
long each takes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from ...launch import make_fabric
from ...recipe import prepare
from ...threads import one_thread
from ...trainer import EVALUATION_BATCH
from .experiment import Experiment, Setting
from .provenance import task_data
from .record import Record
from .trial import Outcome, Trial, recipe_of
from .trial_cache import TrialCache

STEPS = 3
# Stands for a run that has not ended: no rate that was tried is worse.
UNKNOWN = Outcome((0.5,), (math.inf,), (math.inf,), 0.0, False, 0.5, 0.5, (0.0, 0.0))


@dataclass(frozen=True)
class Part:
    """Equal pieces of what has to be computed.

    Args:
        what: what they are, a text for each column.
        count: how many.
        seconds: how long each takes on one thread.
    """

    what: tuple[str, ...]
    count: int
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """How long an experiment takes.

    Args:
        columns: names of what distinguishes parts, and of what is counted.
        parts: all that is missing.
        known: how many pieces are known already.
        seeds: what is known of the number of seeds, as the rest of a sentence.
        differs: what differs from the paper, one sentence each.
    """

    columns: tuple[str, ...]
    parts: tuple[Part, ...]
    known: int = 0
    seeds: str = ""
    differs: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """How many pieces are missing."""
        return sum(part.count for part in self.parts)

    @property
    def seconds(self) -> float:
        """How long the missing pieces take on one thread."""
        return sum(part.count * part.seconds for part in self.parts)


def planned(
    experiment: Experiment, setting: Setting, find: Callable[[Trial], Outcome | None] | None = None
) -> tuple[list[Trial], Record]:
    """Return the trials that an experiment asks for, and a record without their results: none is
    run.

    Rates are chosen and seeds are counted by the outcomes that are known. Where nothing is known,
    the smallest rate and the first seeds stand for them.

    Args:
        experiment: made of trials.
        setting: how it would be run.
        find: returns the outcome of a trial, ``None`` for one that has not been run.
    """
    asked: dict[Trial, Outcome | None] = {}

    def pretend(trials: Sequence[Trial]) -> list[Outcome]:
        placed = [setting.placed(trial) for trial in trials]
        asked.update((trial, find(trial) if find else None) for trial in placed)
        return [asked[trial] or UNKNOWN for trial in placed]

    first = replace(setting, run=pretend, by_power=False, bars=lambda *_: {})
    record = experiment.run(first)
    if setting.by_power and all(asked.values()):
        # the first seeds are there, and say how many are needed
        record = experiment.run(replace(first, by_power=True))
    return list(asked), record


def kind(trial: Trial) -> Trial:
    """Return what runs of about the same length have in common."""
    return replace(trial, lr=1.0, seed=0, test=False, efficiency=False)


def of_trials(experiment: Experiment, setting: Setting, cache: TrialCache) -> Estimate:
    """Estimate the missing runs of an experiment that is made of trials.

    Args:
        experiment: the experiment.
        setting: how it would be run.
        cache: knows runs that have ended; others of the same kind take as long.
    """
    trials, record = planned(experiment, setting, cache.find)
    found = {trial: outcome for trial in trials if (outcome := cache.find(trial)) is not None}
    took: dict[Trial, list[float]] = {}
    for trial, outcome in found.items():
        if not outcome.diverged:
            took.setdefault(kind(trial), []).append(outcome.seconds)
    missing = Counter(replace(trial, lr=1.0, seed=0) for trial in trials if trial not in found)
    parts = [
        Part(
            (trial.task, trial.optimizer, f"{trial.epochs}"),
            count,
            fmean(took[kind(trial)]) if kind(trial) in took else seconds_of(trial),
        )
        for trial, count in missing.items()
    ]
    seeds, first = len({trial.seed for trial in trials if trial.test}), len(setting.seeds)
    pilot = [trial for trial in trials if trial.seed in (*setting.tuning_seeds, *setting.seeds)]
    grows = ""
    if setting.by_power and all(trial in found for trial in pilot):
        grows = f" with {seeds} seeds, by the spread of the first {first}"
    elif setting.by_power:
        grows = ", and more where the spread of the first seeds asks for it"
    columns = ("task", "optimizer", "epochs", "runs")
    return Estimate(columns, tuple(parts), len(found), grows, record.differs)


def seconds_of(trial: Trial) -> float:
    """Return about how long a trial takes on one thread: a few of its steps are taken,
    and one batch is evaluated.

    Args:
        trial: the run; its penal connection and what is watched are left out.

    Example:
        >>> seconds_of(Trial("digits-rows", "sgd", 0.1, 0, 1, options=(("hidden", 4),))) > 0
        True
    """
    task = task_data(trial.task, trial.options)
    fabric = make_fabric(trial.device, 1, precision=trial.precision)
    with one_thread():
        model, optimizer = fabric.setup(*prepare(task, recipe_of(replace(trial, lr=1e-6))))
        inputs, targets = fabric.to_device(
            (task.train.inputs[: trial.batch_size], task.train.targets[: trial.batch_size])
        )

        def step() -> None:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            loss.item()

        # the first step is a warm-up
        step()
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        of_step = (time.perf_counter() - started) / STEPS
        started = time.perf_counter()
        with torch.no_grad():
            model.eval()(fabric.to_device(task.valid.inputs[:EVALUATION_BATCH])).sum().item()
        of_example = (time.perf_counter() - started) / min(EVALUATION_BATCH, len(task.valid))
    steps = trial.epochs * -(-len(task.train) // trial.batch_size)
    looked_at = trial.epochs * len(task.valid) + trial.test * len(task.test)
    return steps * of_step + looked_at * of_example
