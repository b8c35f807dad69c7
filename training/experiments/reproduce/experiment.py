"""Experiments and their settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pathspace.diagnostics.shared.wording import plural

from ..names import texts
from .baselines import baselines
from .holm import POWER
from .markdown import sentences
from .record import Record, percent
from .trial import Trial

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

    ``run`` runs trials and returns their outcomes in order; known ones are not run again. The scale
    is ``embedded``, ``fetched`` for data that ``pathspace data fetch`` brings, or ``full`` for the
    paper's own setting, with the paper's data in the folder ``data``. With ``by_power``, ``seeds``
    are the first of those that are reported: their spread says how many there are, at most
    ``most_seeds``. Budgets are divided by ``shrink``, for tests only. ``bars`` maps a task and its
    options to what simple means and published networks reach on its test split.
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
    """One table or figure of a paper, as ``experiments.toml`` describes it.

    ``minutes`` are those of the embedded scale on one thread; ``needs`` is what ``--scale full``
    expects in ``--data``, empty where there is no such scale; ``full_seeds`` are those of the
    paper. ``fetched``: there is a setting for data that ``pathspace data fetch`` brings.
    ``trials``: it consists of trials, whose journal tells what is reported. ``journal``: a contest
    of many runs, whose journal in ``--out`` has this name at every scale.
    """

    name: str
    summary: str
    minutes: float
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
    known = {
        key: value for key, value in texts()[name].items() if key in Experiment.__dataclass_fields__
    }
    return Experiment(name=name, run=run, draw=draw, **{"needs": "", **known})
