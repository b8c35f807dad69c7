"""Paired comparisons: all arms are tuned and tested in the same way, and a claim states
that one has fewer errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from pathspace.training.experiments.reproduce.baselines import PUBLISHED
from pathspace.training.experiments.reproduce.experiment import Setting
from pathspace.training.experiments.reproduce.holm import Claim
from pathspace.training.experiments.reproduce.pictures import draw_curves, legend, panels
from pathspace.training.experiments.reproduce.recipes import Cell, listed
from pathspace.training.experiments.reproduce.record import Record, Table, about, judged
from pathspace.training.experiments.reproduce.record import remarks as told
from pathspace.training.experiments.reproduce.tuning import Arm, Measured, measure_enough, versus


@dataclass(frozen=True)
class PairedComparison:
    """A claim that one arm errs less than another.

    Args:
        statement: the claim.
        ours: label of the arm that is claimed to be better.
        rival: label of the other.
        printed: the paper's two figures, lower is better, in the same order.
    """

    statement: str
    ours: str
    rival: str
    printed: tuple[float, float] | None = None


@dataclass(frozen=True)
class Show:
    """The format of an experiment's figures.

    Args:
        metric: what the metric is called, with its unit.
        factor: what it is multiplied by for people.
        pattern: how ``format`` writes it.
    """

    metric: str
    factor: float = 1.0
    pattern: str = ".2f"

    def value(self, number: float) -> str:
        """Write one number."""
        return "–" if math.isnan(number) else format(self.factor * number, self.pattern)


PERCENT = Show("error in %", 100.0)


def hold(
    setting: Setting,
    pairs: Sequence[tuple[Cell, Arm]],
    duels: Sequence[PairedComparison],
    *,
    name: str,
    paper: Table | None = None,
    remarks: Sequence[str] = (),
    figures: Mapping[str, object] | None = None,
    show: Show = PERCENT,
) -> tuple[Record, dict[str, Measured]]:
    """Tune and test the arms, judge the duels and fill the record.

    Args:
        setting: how.
        pairs: the contenders, whose labels differ, each after the paper's
            recipe that it stands for.
        duels: the claims.
        name: of the experiment.
        paper: the paper's figures, where they are not among its texts.
        remarks: what else differs besides what is among its texts, one sentence each.
        figures: fields of its texts.
        show: how figures are written.

    Returns:
        The record, and the measured arms by label.
    """
    arms = [arm for _, arm in pairs]
    tasks = {arm.base.task: arm.base.options for arm in arms}
    bars = {task: setting.bars(task, options) for task, options in tasks.items()}

    def claims_of(measured: Sequence[Measured]) -> list[Claim]:
        by = {m.arm.label: m for m in measured}
        return [
            versus(d.statement, by[d.ours], by[d.rival], d.printed, bars[by[d.ours].arm.base.task])
            for d in duels
        ]

    measured, claims = measure_enough(arms, setting, claims_of)
    columns = (
        "arm",
        "learning rate",
        f"validation {show.metric}",
        f"test {show.metric}",
        "diverged",
    )
    record = Record(
        **about(name) | ({} if paper is None else {"paper": paper}),
        scale=setting.scale,
        ours=Table(
            columns,
            (
                *(row(m, show) for m in measured),
                *(r for task in tasks for r in bar_rows(task, bars[task], show)),
            ),
        ),
        differs=(
            *listed(pairs, setting, max(len(m.outcomes) for m in measured)),
            *told(name, **figures or {}),
            *remarks,
        ),
        protocol=setting.protocol,
        claims=judged(claims),
        data={
            "metric": show.metric,
            "factor": show.factor,
            "arms": [m.to_dict() for m in measured],
        },
        seconds=sum(m.seconds for m in measured),
    )
    return record, {m.arm.label: m for m in measured}


def row(m: Measured, show: Show) -> tuple[str, ...]:
    """Return an arm's line of the table."""
    interval = m.interval
    test = (
        f"{show.value(interval.mean)} ± {show.value(interval.half_width)}"
        if interval.count
        else "–"
    )
    diverged = sum(outcome.diverged for outcome in m.outcomes)
    rate = f"{m.lr:g}{'*' if m.edge else ''}"
    return (m.arm.label, rate, show.value(m.tuning[m.lr]), test, f"{diverged} of {len(m.outcomes)}")


def bar_rows(task: str, bars: dict[str, float], show: Show) -> list[tuple[str, ...]]:
    """Return the lines of simple means, and of what others report, in a table of arms."""
    known = bars | dict([PUBLISHED[task]]) if task in PUBLISHED else bars
    return [(name, "–", "–", show.value(value), "–") for name, value in known.items()]


def draw_paired_comparison(record: Record) -> Figure:
    """Draw training loss and validation metric of every arm against epochs.

    Args:
        record: of a duel.

    Returns:
        A figure of two panels.
    """
    with panels(2) as (figure, axes):
        factor = record.data["factor"]
        for place, arm in enumerate(record.data["arms"]):
            draw_curves(axes[0], place, arm["label"], arm["train_losses"])
            scaled = [
                [None if v is None else factor * v for v in line] for line in arm["valid_metrics"]
            ]
            draw_curves(axes[1], place, arm["label"], scaled)
        axes[0].set(title="training loss", xlabel="epoch")
        axes[1].set(title=f"validation {record.data['metric']}", xlabel="epoch")
        legend(figure, axes[0])
        return figure
