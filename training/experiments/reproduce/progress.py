"""Runs behind a bar that counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .trial_cache import TrialCache, run_all


def run_counted(trials: Sequence[Any], cache: TrialCache, console: Console, jobs: int) -> list[Any]:
    """Run trials by :func:`~pathspace.training.experiments.reproduce.trial_cache.run_all`."""
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("runs", total=len({*trials}))

        def done(trial: Any) -> None:
            progress.update(bar, advance=1, description=trial.label)

        return run_all(trials, cache, jobs, done)
