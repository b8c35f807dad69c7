"""``optimizers``: a leaderboard from default starts, from rescaled copies of them, and from unit skeletons."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pathspace.files import make_folder
from pathspace.training.experiments.intervals import t_interval
from pathspace.training.experiments.reproduce.experiment import Experiment, Setting
from pathspace.training.experiments.reproduce.holm import Claim, gain, judge
from pathspace.training.experiments.reproduce.leaderboard_run import (
    ARMS,
    ONLY,
    STARTS,
    TASKS,
    Result,
    Run,
    carry_out,
    chance,
    rates,
)
from pathspace.training.experiments.reproduce.pictures import legend, look, panels
from pathspace.training.experiments.reproduce.record import Record, Table, judged

TUNING_SEEDS = (1000, 1001)


class Journal:
    """Results of runs in a file of one line each, so that an interrupted contest goes on where it was.

    Args:
        path: the file; ``None`` keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[Run, Result] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                values: dict[str, Any] = {
                    key: math.nan if value is None else value for key, value in entry["result"].items()
                }
                self.known[Run(**entry["run"])] = Result(**values)

    def result(self, run: Run) -> Result:
        """The result of a run, which is carried out unless it is known."""
        if run not in self.known:
            self.known[run] = carry_out(run)
            if self.path is not None:
                make_folder(str(self.path.parent))
                line = json.dumps({"run": asdict(run), "result": self.known[run].to_dict()})
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        return self.known[run]


@dataclass(frozen=True)
class Entry:
    """What a contender led to on a task from a start.

    Attributes:
        start: where it started.
        task: on what.
        arm: which contender.
        lr: the rate that was chosen.
        results: one for each of the fresh seeds.
    """

    start: str
    task: str
    arm: str
    lr: float
    results: tuple[Result, ...]

    @property
    def losses(self) -> list[float]:
        """Test loss by seed; a run that failed counts as a guess, or as what it ended with if that is worse."""
        guess = chance(self.task)
        return [
            max(guess, one.test) if one.failed and math.isfinite(one.test) else guess if one.failed else one.test
            for one in self.results
        ]

    def show(self) -> str:
        """Mean and interval, the rate (* at the edge of the search), failed runs."""
        failed = sum(one.failed for one in self.results)
        edge = "*" if self.lr in (rates(self.arm)[0], rates(self.arm)[-1]) else ""
        return f"{t_interval(self.losses).show('.3f')} ({self.lr:g}{edge}{f', {failed} failed' if failed else ''})"


def contest(
    result: Callable[[Run], Result],
    starts: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    tasks: Sequence[str] = tuple(TASKS),
    arms: Sequence[str] = tuple(ARMS),
) -> Iterator[Entry]:
    """Tune and test every contender on every task from every start.

    The rate is that of the least mean validation loss of the tuning seeds; the other seeds are new.

    Args:
        result: carries out a run.
        starts: where to start.
        seeds: seeds that are reported.
        steps: steps of a run.
        tasks: which tasks.
        arms: which contenders.

    Yields:
        One entry for each.
    """
    for start in starts:
        for task in tasks:
            for arm in arms:
                if task not in ONLY.get(arm, TASKS):
                    continue
                table = {}
                for rate in rates(arm):
                    tried = [result(Run(task, start, arm, rate, seed, steps)) for seed in TUNING_SEEDS]
                    table[rate] = math.inf if any(one.failed for one in tried) else sum(one.valid for one in tried)
                best = min(table, key=lambda rate: (table[rate], rate))
                fresh = [result(Run(task, start, arm, best, seed, steps)) for seed in seeds]
                yield Entry(start, task, arm, best, tuple(fresh))


def record(entries: Sequence[Entry], setting: Setting, steps: int) -> Record:
    """Write entries as a record: a table by task and contender, and pairs of contenders on trial.

    Args:
        entries: what was measured.
        setting: how.
        steps: steps of a run.
    """
    by = {(entry.task, entry.arm, entry.start): entry for entry in entries}
    starts = [start for start in STARTS if any(entry.start == start for entry in entries)]
    rows = tuple(
        (task, arm, *(by[task, arm, start].show() if (task, arm, start) in by else "–" for start in starts))
        for task in TASKS
        for arm in ARMS
        if any((task, arm, start) in by for start in starts)
    )
    claims: list[Claim] = []
    for kind in ("AdamW", "SGD", "Muon"):
        for task in TASKS:
            for start in starts:
                pair = [by.get((task, name, start)) for name in (f"gauge-fixed {kind}", kind)]
                if pair[0] is not None and pair[1] is not None:
                    statement = f"{task}, {start} start: gauge-fixed {kind} ends lower than {kind}"
                    claims.append(gain(statement, pair[0].losses, pair[1].losses))
    lacking = [arm for arm in ARMS if not any(entry.arm == arm for entry in entries)]
    lacking += [f"{task} (task)" for task in TASKS if not any(entry.task == task for entry in entries)]
    lacking += [f"{start} (start)" for start in STARTS if start not in starts]
    return Record(
        name="optimizers",
        title="Optimizers from default starts, and from rescaled copies of them: mean test loss of fresh seeds",
        source="A comparison of this project, not of a paper",
        scale=setting.scale,
        paper=Table(("finding",), (("none: no paper makes this comparison",),)),
        ours=Table(("task", "contender", *(f"{start} start" for start in starts)), rows),
        differs=(
            "Tasks: 8 x 8 digits (MLP of three hidden layers, CNN, ResNet of 8 layers, transformer of 2 blocks), "
            "characters of Python's documentation (transformer of 2 blocks), adapters of rank 4 beside a frozen MLP "
            "that was trained on digits and meets them turned by 90 degrees.",
            "A scrambled start is the default start, rescaled by factors between 1/100 and 100 (1/10 and 10), even in "
            "logarithm; for adapters, by their own gauge.",
            "Muon moves matrices; all else, kernels included, moves by AdamW at a tenth of its rate. G-SGD and "
            "G-Adam take the magnitude rule, G-SGD with max_multiplier=1. Path-SGD takes sums over paths only; LoRA+ "
            "is for adapters.",
            *((f"Not run: {', '.join(lacking)}.",) if lacking else ()),
        ),
        protocol=(
            f"{steps} steps of batches of 32, the rate falling to 0 in a straight line. For each contender, task and "
            f"start 8 rates by factors of about 3, chosen by the mean validation loss of {len(TUNING_SEEDS)} tuning "
            "seeds; in brackets the rate, * at the edge of the search.",
            f"Reported: {len(setting.seeds)} fresh seeds, mean test loss with its 95 % interval. A run that fails (not "
            "finite, ends above its start, or refused) counts as a guess.",
            *((f"Budgets were divided by {setting.shrink}.",) * (setting.shrink > 1)),
        ),
        claims=judged(judge(claims)),
        caption="Mean test loss and 95 % interval by contender",
        data={
            "entries": [
                {"start": e.start, "task": e.task, "arm": e.arm, "lr": e.lr, "losses": e.losses} for e in entries
            ]
        },
        seconds=sum(one.seconds for entry in entries for one in entry.results),
    )


def run(setting: Setting) -> Record:
    """Run the contest; runs that are known are not run again."""
    steps = setting.budget(150)
    journal = Journal(Path("runs") / "optimizers.jsonl")
    return record(list(contest(journal.result, STARTS, setting.seeds, steps)), setting, steps)


def draw(found: Record) -> Figure:
    """One panel for each task: contenders beside each other, starts in colours."""
    entries = found.data["entries"]
    tasks = [task for task in TASKS if any(entry["task"] == task for entry in entries)]
    starts = [start for start in STARTS if any(entry["start"] == start for entry in entries)]
    with panels(len(tasks), width=2.4, height=3.8) as (figure, axes):
        for panel, task in zip(axes, tasks, strict=True):
            arms = [arm for arm in ARMS if any((e["task"], e["arm"]) == (task, arm) for e in entries)]
            for place, start in enumerate(starts):
                mine = [e for e in entries if (e["task"], e["start"]) == (task, start)]
                spans = [t_interval(e["losses"]) for e in mine]
                at = [arms.index(e["arm"]) + 0.15 * place for e in mine]
                panel.errorbar(
                    at,
                    [span.mean for span in spans],
                    [span.half_width for span in spans],
                    linestyle="none",
                    markersize=3,
                    label=start,
                    **look(place),
                )
            panel.set_xticks(range(len(arms)), arms, rotation=90)
            panel.set(title=task, yscale="log")
        axes[0].set(ylabel="test loss")
        legend(figure, axes[0])
        return figure


OPTIMIZERS = Experiment(
    "optimizers", "eleven optimizers from default, rescaled and unit-skeleton starts", 90, "", run, draw
)

__all__ = ["OPTIMIZERS", "TUNING_SEEDS", "Entry", "Journal", "contest", "draw", "record", "run"]
