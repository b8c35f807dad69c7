"""An estimate of an experiment's duration: ``pathspace reproduce NAME --dry-run``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from pathspace.training.experiments.reproduce.experiment import Experiment, Setting
from pathspace.training.experiments.reproduce.provenance import task_data
from pathspace.training.experiments.reproduce.trial import Outcome, Trial
from pathspace.training.experiments.reproduce.trial_cache import TrialCache
from pathspace.training.launch import make_fabric
from pathspace.training.recipe import Recipe, prepare
from pathspace.training.threads import one_thread
from pathspace.training.trainer import EVALUATION_BATCH

STEPS = 3


def planned(experiment: Experiment, setting: Setting) -> list[Trial]:
    """Return the trials that an experiment asks for, without running any.

    Which rate is chosen, and how many seeds the spread of the first ones will ask for, is not known
    before: the smallest rate and the first seeds stand for them.

    Args:
        experiment: made of trials.
        setting: how it would be run.
    """
    asked: dict[Trial, None] = {}

    def pretend(trials: Sequence[Trial]) -> list[Outcome]:
        asked.update(dict.fromkeys(trials))
        return [Outcome((0.5,), (0.5,), (0.5,), 0.0, False, 0.5, 0.5, (0.0, 0.0)) for _ in trials]

    experiment.run(replace(setting, run=pretend, by_power=False, bars=lambda *_: {}))
    return [setting.placed(trial) for trial in asked]


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
        model, optimizer = fabric.setup(
            *prepare(task, Recipe(trial.optimizer, 1e-6, trial.init, trial.rule, trial.seed))
        )
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


def show_estimate(
    experiment: Experiment, setting: Setting, cache: TrialCache, jobs: int, console: Console
) -> float:
    """Print how many runs there are, how many are known, and about how long the others take.

    Args:
        experiment: what would be run.
        setting: how.
        cache: knows runs that have ended.
        jobs: processes that would share the runs.
        console: where to print.

    Returns:
        The minutes.
    """
    if not experiment.trials:
        console.print(
            f"'{experiment.name}' takes about {experiment.minutes:g} minutes on one thread.",
            highlight=False,
        )
        return experiment.minutes
    trials = planned(experiment, setting)
    missing = Counter(
        replace(trial, lr=1.0, seed=0) for trial in trials if cache.find(trial) is None
    )
    table = Table("task", "optimizer", "epochs", "runs", "minutes each", title_justify="left")
    minutes = 0.0
    for trial, runs in missing.items():
        each = seconds_of(trial) / 60
        minutes += runs * each
        table.add_row(trial.task, trial.optimizer, f"{trial.epochs}", f"{runs}", f"{each:.1f}")
    console.print(table)
    grows = ", and more where the spread of the first seeds asks for it" * setting.by_power
    console.print(
        f"{len(trials)} runs{grows}; {len(trials) - sum(missing.values())} are known. The others"
        f" take about {minutes / jobs:.0f} minutes with --jobs {jobs}.",
        highlight=False,
    )
    return minutes / jobs
