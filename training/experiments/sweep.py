"""``pathspace sweep``: every combination of learning rate, penal strength and
seed, resumable, in one table.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pathspace.diagnostics.shared.wording import plural
from pathspace.errors import InputError
from pathspace.files.writing import ensure_writable, make_folder, replacing

from .intervals import Interval, t_interval
from .reproduce.progress import run_counted
from .reproduce.trial import Outcome, Trial
from .reproduce.trial_cache import TrialCache
from .tasks import load_task


@dataclass(frozen=True)
class GridPoint:
    """One combination of the grid: the validation metric at the last epoch over the seeds that did
    not diverge, and how many did.
    """

    lr: float
    tau: float
    valid: Interval
    diverged: int


def grid(base: Trial, rates: Sequence[float], taus: Sequence[float], seeds: int) -> list[Trial]:
    """Return a trial for every combination."""
    for what, values, expected, fits in (
        ("learning rates", rates, "positive numbers", lambda v: v > 0),
        ("strengths tau", taus, "numbers of at least 0", lambda v: v >= 0),
    ):
        if not values or not all(math.isfinite(v) and fits(v) for v in values):  # type: ignore[no-untyped-call]
            raise InputError(f"A sweep found {what} {list(values)}, expected {expected}.")
    return [
        replace(base, lr=lr, tau=tau, seed=seed)
        # (a value that was given twice is no second measurement)
        for lr in dict.fromkeys(rates)
        for tau in dict.fromkeys(taus)
        for seed in range(seeds)
    ]


def ranked_points(trials: Sequence[Trial], outcomes: Sequence[Outcome]) -> list[GridPoint]:
    """Gather the outcomes of each combination, the best first; combinations
    with divergence come last.
    """
    found = []
    for lr, tau in dict.fromkeys((trial.lr, trial.tau) for trial in trials):
        here = [o for t, o in zip(trials, outcomes, strict=True) if (t.lr, t.tau) == (lr, tau)]
        sound = [o.valid_metrics[-1] for o in here if not o.diverged]
        found.append(GridPoint(lr, tau, t_interval(sound), len(here) - len(sound)))
    return sorted(
        found,
        key=lambda cell: (
            cell.diverged,
            np.nan_to_num(cell.valid.mean, nan=np.inf),
            cell.lr,
            cell.tau,
        ),
    )


def run_sweep(
    base: Trial,
    rates: Sequence[float],
    taus: Sequence[float],
    seeds: int,
    out: str,
    jobs: int,
    console: Console,
) -> list[GridPoint]:
    """Run what is missing of a grid, print its table and write ``sweep.csv``."""
    task = load_task(base.task, **dict(base.options))
    trials = grid(base, rates, taus, seeds)
    folder = make_folder(out)
    ensure_writable(folder / "sweep.csv")
    cache = TrialCache(folder / "trials")
    outcomes = run_counted(trials, cache, console, jobs=jobs)
    rows = ranked_points(trials, outcomes)
    name = task.metric_name
    title = f"{task.name} with {base.optimizer}: validation {name}"
    table = Table(title=title, title_justify="left")
    for column in ("learning rate", "tau", f"validation {name}", "diverged"):
        table.add_column(column, justify="right")
    for point in rows:
        shown = point.valid.show(task.metric_format)
        table.add_row(f"{point.lr:g}", f"{point.tau:g}", shown, f"{point.diverged} of {seeds}")
    spent = f"{plural(base.epochs, 'epoch')}, {plural(seeds, 'seed')}"
    table.caption = f"{spent}, 95 % t-intervals; the test split was not looked at."
    console.print(table)
    lines: list[list[Any]] = [
        ["learning_rate", "tau", f"valid_{name}", "half_width_95", "seeds", "diverged"]
    ]
    lines += [[point.lr, point.tau, *astuple(point.valid), point.diverged] for point in rows]
    with replacing(folder / "sweep.csv") as temporary, open(temporary, "w", newline="") as file:
        csv.writer(file).writerows(lines)
    return rows
