"""``pathspace reproduce NAME --dry-run``: which runs are missing, and what would differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from pathspace.diagnostics.shared.wording import plural

from .experiment import Experiment, Setting
from .record import Record
from .trial_cache import TrialCache


def planned(
    experiment: Experiment, setting: Setting, find: Callable[[Any], Any] | None = None
) -> tuple[list[Any], Record]:
    """Return the runs that an experiment asks for, and a record without their results: none is
    carried out.

    Rates are chosen and seeds are counted by the outcomes that are known. Where nothing is known,
    the smallest rate and the first seeds stand for them.

    Args:
        experiment: made of runs.
        setting: how it would be run.
        find: returns the outcome of a run, ``None`` for one that has not ended.
    """
    asked: dict[Any, Any] = {}

    def pretend(trials: Sequence[Any]) -> list[Any]:
        placed = [setting.placed(trial) for trial in trials]
        asked.update((trial, find(trial) if find else None) for trial in placed)
        return [asked[trial] or trial.unknown for trial in placed]

    first = replace(setting, run=pretend, by_power=False, bars=lambda *_: {})
    record = experiment.run(first)
    if setting.by_power and all(asked.values()):
        # the first seeds are there, and say how many are needed
        record = experiment.run(replace(first, by_power=True))
    return list(asked), record


def show_missing(
    experiment: Experiment, setting: Setting, cache: TrialCache, console: Console
) -> int:
    """Print how many runs there are and how many are known; for the paper's own setting also what
    would differ from it, the data first.

    Args:
        experiment: what would be run.
        setting: how.
        cache: knows runs that have ended.
        console: where to print.

    Returns:
        How many runs are missing.
    """
    if not (experiment.trials or experiment.journal):
        console.print(f"'{experiment.name}' is one piece of work, which is not kept in runs.")
        return 1
    runs, record = planned(experiment, setting, cache.find)
    missing = [run for run in runs if cache.find(run) is None]
    for name, count in Counter(run.label.partition(" lr ")[0] for run in missing).items():
        console.print(f"{name}: {plural(count, 'run')}", highlight=False)
    seeds = len({run.seed for run in runs} - {*setting.tuning_seeds})
    more = ", and more where their spread asks for it" * (setting.by_power and bool(missing))
    console.print(
        f"{plural(len(runs), 'run')} with {plural(seeds, 'fresh seed')}{more};"
        f" {len(runs) - len(missing)} are known.",
        highlight=False,
        soft_wrap=True,
    )
    if setting.scale == "full" and record.differs:
        data_first = sorted(record.differs, key=lambda line: not line.startswith("Data:"))
        lines = ["Differences from the paper:", *(f"  {line}" for line in data_first)]
        console.print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)
    return len(missing)
