"""Paired comparisons: arms tuned and tested alike; a claim states that one has fewer errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from ..names import texts
from .holm import Claim
from .pictures import draw_arms, legend, panels
from .recipes import Cell, full_arms, listed, table_cells
from .record import Record, Table, about, judged
from .record import remarks as remarks_of
from .trial import Trial
from .tuning import Arm, Measured, Setting, measure_enough, versus


@dataclass(frozen=True)
class PairedComparison:
    """A claim that one arm errs less than another; ``printed`` are the paper's two figures."""

    statement: str
    ours: str
    rival: str
    printed: tuple[float, float] | None = None


def effect(ours: Cell, rival: Cell) -> tuple[float, float] | None:
    """Return what is printed for two arms, where it is."""
    return None if ours.error is None or rival.error is None else (ours.error, rival.error)


def base_run(name: str, setting: Setting) -> tuple[Trial, dict[str, Any]]:
    """Return an experiment's run at a scale of ours, without its arms, and what else is said."""
    entry = texts()[name]["runs"][setting.scale]
    told = {"lr": 0.0, "seed": 0, "task": "", "optimizer": "sgd", **entry}
    more = {key: told.pop(key) for key in entry if key not in Trial.__dataclass_fields__}
    told["epochs"] = setting.budget(told["epochs"])
    told["options"] = tuple(told.get("options", {}).items())
    return Trial(**told), more


def run_comparison(
    name: str, setting: Setting, change: Callable[[Arm], Arm] = lambda arm: arm, **more: Any
) -> tuple[Record, dict[str, Measured], list[PairedComparison]]:
    """Carry out an experiment whose arms and claims ``experiments.toml`` has, or all cells of its
    table in the paper's own setting; ``more`` is for :func:`hold`. Return also the measured arms by
    name, and the comparisons.
    """
    entry = texts()[name]
    cells = table_cells(entry["table"])
    if setting.scale == "full":
        arms, left = full_arms(entry["table"], setting)
        pairs = [(cells[place], change(arm)) for place, arm in arms.items()]
        # the side of the table that claims do not name
        side = int(entry["full"][0][1] in {row for row, _ in cells})
        duels = []
        for group in dict.fromkeys(place[side] for place in cells):
            for says, *two in entry["full"]:
                ours, rival = ((one, group) if side else (group, one) for one in two)
                if ours in arms and rival in arms:
                    printed = effect(cells[ours], cells[rival])
                    names = ": ".join(ours), ": ".join(rival)
                    duels.append(PairedComparison(f"{group}: {says}", *names, printed))
        more["remarks"] = left
    else:
        base, told = base_run(name, setting)
        pairs = []
        for own in map(dict, entry["arms"]):
            label, place, factor = own.pop("label"), own.pop("cell"), own.pop("factor", 1.0)
            rates = tuple(float(f"{factor * rate:.3g}") for rate in told["rates"])
            pairs.append((cells[tuple(place)], change(Arm(label, replace(base, **own), rates))))
        by_label = {arm.label: cell for cell, arm in pairs}
        duels = [
            PairedComparison(
                says, ours, rival, effect(by_label[ours], by_label[rival]) if printed else None
            )
            for says, ours, rival, *printed in entry["claims"]
        ]
    return *hold(setting, pairs, duels, name=name, **more), duels


@dataclass(frozen=True)
class Show:
    """The format of an experiment's figures: metric with unit, factor, and ``format``'s pattern."""

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
    by_task: bool = False,
) -> tuple[Record, dict[str, Measured]]:
    """Tune and test the arms, judge the duels and fill the record; return it with the measured arms
    by name. Each arm stands after the paper's recipe that it stands for. With ``by_task``, arms of
    several tasks share labels: they are named ``task: label``, and each task has its own part of
    the table.
    """
    arms = [arm for _, arm in pairs]
    tasks = {arm.base.task: arm.base.options for arm in arms}
    bars = {task: setting.bars(task, options) for task, options in tasks.items()}

    def named(task: str, label: str) -> str:
        return f"{task}: {label}" if by_task else label

    def claims_of(measured: Sequence[Measured]) -> list[Claim]:
        by = {named(m.arm.base.task, m.arm.label): m for m in measured}
        return [
            versus(d.statement, by[d.ours], by[d.rival], d.printed, bars[by[d.ours].arm.base.task])
            for d in duels
        ]

    measured, claims = measure_enough(arms, setting, claims_of)
    by_name = {named(m.arm.base.task, m.arm.label): m for m in measured}
    rows: list[tuple[str, ...]] = []
    for part in [[task] for task in tasks] if by_task else [list(tasks)]:
        rows += [(name, *row(m, show)) for name, m in by_name.items() if m.arm.base.task in part]
        rows += [
            (named(task, name), "–", "–", show.value(value), "–")
            for task in part
            for name, value in bars[task].items()
        ]
    metrics = f"validation {show.metric}", f"test {show.metric}"
    columns = ("arm", "learning rate", *metrics, "diverged")
    labelled = [(cell, replace(arm, label=named(arm.base.task, arm.label))) for cell, arm in pairs]
    seeds = max(len(m.outcomes) for m in measured)
    record = Record(
        **about(name) | ({} if paper is None else {"paper": paper}),
        scale=setting.scale,
        ours=Table(columns, tuple(rows)),
        differs=(
            *listed(labelled, setting, seeds),
            *remarks_of(name, **figures or {}),
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
    return record, by_name


def row(m: Measured, show: Show) -> tuple[str, ...]:
    """Return an arm's line of the table, without its name."""
    mean, half, count = astuple(m.interval)
    test = f"{show.value(mean)} ± {show.value(half)}" if count else "–"
    diverged = sum(outcome.diverged for outcome in m.outcomes)
    rate = f"{m.lr:g}{'*' if m.edge else ''}"
    return (rate, show.value(m.tuning[m.lr]), test, f"{diverged} of {len(m.outcomes)}")


def draw_paired_comparison(record: Record) -> Figure:
    """Draw training loss and validation metric of every arm against epochs."""
    arms, metric = record.data["arms"], record.data["metric"]
    with panels(2) as (figure, axes):
        draw_arms(axes[0], arms, "train_losses", title="training loss")
        factor = record.data["factor"]
        draw_arms(axes[1], arms, "valid_metrics", factor, title=f"validation {metric}")
        legend(figure, axes[0])
        return figure
