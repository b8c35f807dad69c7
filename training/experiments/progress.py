"""Progress bars: the position in a run, its latest results, its speed and the remaining time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..history import Tick
from ..task import Task

# A step can be shorter than a redraw of the bar, so updating it at every step
# would slow training down.
REFRESH_SECONDS = 0.1


def counting(console: Console) -> Progress:
    """Create bars with a count and the time since the start.

    Args:
        console: the console.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


@contextmanager
def run_progress(console: Console, task: Task) -> Iterator[Callable[[str], Callable[[Tick], None]]]:
    """Show a bar for a run.

    Args:
        console: the console.
        task: the task, for the name and the format of its metric.

    Yields:
        A function to call at the start of the run with its name; it returns the run's watcher.

    Example:
        >>> from pathspace.training.experiments.tasks import load_task
        >>> with run_progress(Console(quiet=True), load_task("digits-rows")) as begin:
        ...     begin("sgd")(Tick(step=1, steps=10, epoch=1, loss=2.3, metric=0.9))
    """
    progress = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
        TextColumn("eta"),
        TimeRemainingColumn(compact=True),
        console=console,
        refresh_per_second=4,
    )
    with progress:

        def begin(name: str) -> Callable[[Tick], None]:
            bar = progress.add_task(name, total=None, numbers="")
            started, first, shown = 0.0, 0, 0.0

            def watch(tick: Tick) -> None:
                nonlocal started, first, shown
                now = time.perf_counter()
                if not first:
                    started, first = now, tick.step
                if now - shown < REFRESH_SECONDS and tick.step != tick.steps:
                    return
                shown = now
                metric = "–" if math.isnan(tick.metric) else format(tick.metric, task.metric_format)
                speed = (tick.step - first) / max(now - started, 1e-9)
                numbers = f"loss {tick.loss:.3g}  {task.metric_name} {metric}  {speed:.0f} steps/s"
                progress.update(bar, total=tick.steps, completed=tick.step, numbers=numbers)

            return watch

        yield begin
