"""``optimizers``: a leaderboard from default starts, from rescaled copies of them, and from unit skeletons.

The question comes first: is AdamW in the canonical gauge as good as AdamW from default starts, and better where the
start was rescaled? Then come all other contenders, in an order that leaves something to read where time ends.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from pathspace.files import make_folder
from pathspace.training.experiments.intervals import t_interval
from pathspace.training.experiments.reproduce.experiment import Experiment, Setting
from pathspace.training.experiments.reproduce.holm import Claim, gain, judge
from pathspace.training.experiments.reproduce.leaderboard_run import (
    ARMS,
    ONLY,
    STARTS,
    STEPS,
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
OURS, RIVAL = "gauge-fixed AdamW", "AdamW"
DEFAULT, SCRAMBLED = STARTS[:2]
# seeds 0 to 4 determined the number of seeds for a paired test, and are not reported
FIRST_SEED = 5
# where they cost little, the question gets twice as many seeds
CHEAP = ("MLP", "CNN", "adapters")


class TimeIsUp(Exception):
    """The time limit is reached, and no further run starts."""


class Journal:
    """Results of runs in a file with one line per run, so that an interrupted contest can continue.

    Args:
        path: the file; ``None`` keeps nothing.
        minutes: after so many, no further run begins; ``None``: all are carried out.
    """

    def __init__(self, path: Path | None, minutes: float | None = None) -> None:
        self.path = path
        self.until = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.known: dict[Run, Result] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                values: dict[str, Any] = {
                    key: math.nan if value is None else value for key, value in entry["result"].items()
                }
                self.known[Run(**entry["run"])] = Result(**values)

    def result(self, run: Run) -> Result:
        """The result of a run, which is carried out unless it is known.

        Raises:
            TimeIsUp: it is not known, and no further run is to begin.
        """
        if run not in self.known:
            if time.monotonic() >= self.until:
                raise TimeIsUp
            self.known[run] = carry_out(run)
            if self.path is not None:
                make_folder(str(self.path.parent))
                line = json.dumps({"run": asdict(run), "result": self.known[run].to_dict()})
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        return self.known[run]


@dataclass(frozen=True)
class Entry:
    """The results of a contender on a task from a start.

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


Case = tuple[str, str, str]


def cases() -> Iterator[Case]:
    """Start, task and contender of all that is compared: the question, then all else, small tasks first."""
    seen: set[Case] = set()
    for starts, arms in (((DEFAULT, SCRAMBLED), (RIVAL, OURS)), (STARTS, tuple(ARMS))):
        for task in STEPS:
            for arm in arms:
                for start in starts:
                    case = (start, task, arm)
                    if task in ONLY.get(arm, TASKS) and case not in seen:
                        seen.add(case)
                        yield case


def seeds_of(case: Case, seeds: Sequence[int]) -> Sequence[int]:
    """The seeds that are reported of a case: more for the question and where they cost little.

    Args:
        case: start, task and contender.
        seeds: as many as the question gets where runs cost much.

    Example:
        >>> [len(seeds_of((start, "ViT", "AdamW"), range(5, 15))) for start in ("default", "scrambled 10")]
        [10, 5]
    """
    start, task, arm = case
    question = arm in (OURS, RIVAL) and start in (DEFAULT, SCRAMBLED)
    if question and task in CHEAP:
        return [*seeds, *(seed + len(seeds) for seed in seeds)]
    return seeds if question or task in CHEAP or arm in ONLY else seeds[: max(2, len(seeds) // 2)]


def contest(
    result: Callable[[Run], Result], chosen: Iterable[Case], seeds: Sequence[int], shrink: int = 1
) -> Iterator[Entry]:
    """Tune and test contenders.

    The rate is that of the least mean validation loss of the tuning seeds; the other seeds are new.

    Args:
        result: carries out a run, or raises :class:`TimeIsUp`: what is incomplete is left out.
        chosen: start, task and contender.
        seeds: seeds that are reported (:func:`seeds_of`).
        shrink: divide steps by this.

    Yields:
        One entry for each.
    """
    for start, task, arm in chosen:
        steps = max(1, STEPS[task] // shrink)
        table = {}
        try:
            for rate in rates(arm):
                tried = [result(Run(task, start, arm, rate, seed, steps)) for seed in TUNING_SEEDS]
                table[rate] = math.inf if any(one.failed for one in tried) else sum(one.valid for one in tried)
            best = min(table, key=lambda rate: (table[rate], rate))
            fresh = [result(Run(task, start, arm, best, seed, steps)) for seed in seeds_of((start, task, arm), seeds)]
        except TimeIsUp:
            continue
        yield Entry(start, task, arm, best, tuple(fresh))


def claims_of(by: Mapping[Case, Entry]) -> tuple[Claim, ...]:
    """The claims on trial, in families that are corrected apart: the question, what it presumes twice, all others.

    A claim decides nothing where neither contender beats a guess: where both 95 % intervals reach its loss.
    """

    def pair(statement: str, ours: Case, rival: Case) -> list[Claim]:
        if ours not in by or rival not in by:
            return []
        losses = list(zip(by[ours].losses, by[rival].losses, strict=False))
        claim = gain(statement, [a for a, _ in losses], [b for _, b in losses])
        ends = [span.mean + span.half_width for span in (t_interval(by[ours].losses), t_interval(by[rival].losses))]
        guess = chance(ours[1])
        return [replace(claim, nothing="neither beats a guess") if min(ends) >= guess else claim]

    better, hurt, slowed, others = [], [], [], []
    for task in STEPS:
        statement = f"{task}, {SCRAMBLED} start: {OURS} ends lower than {RIVAL}"
        better += pair(statement, (SCRAMBLED, task, OURS), (SCRAMBLED, task, RIVAL))
        hurt += pair(
            f"{task}: {RIVAL} ends lower from the default start than from the {SCRAMBLED} one",
            (DEFAULT, task, RIVAL),
            (SCRAMBLED, task, RIVAL),
        )
        slowed += pair(
            f"{task}: SGD ends lower from the default start than from the {SCRAMBLED} one",
            (DEFAULT, task, "SGD"),
            (SCRAMBLED, task, "SGD"),
        )
        for start in STARTS:
            for kind in (RIVAL, "SGD", "Muon", "LoRA+"):
                if (start, kind) != (SCRAMBLED, RIVAL):
                    statement = f"{task}, {start} start: gauge-fixed {kind} ends lower than {kind}"
                    others += pair(statement, (start, task, f"gauge-fixed {kind}"), (start, task, kind))
    return (*judge(better), *judge(hurt), *judge(slowed), *judge(others))


def standing(by: Mapping[Case, Entry]) -> Table:
    """The question by task: is the gauge as good from the default start, the same from rescaled ones, and better?"""
    short: dict[str, str] = {"better": "yes", "worse": "no"}
    verdicts = {claim.statement: short.get(claim.verdict, claim.verdict) for claim in claims_of(by)}
    rows = []
    for task in STEPS:
        four = [by.get((start, task, arm)) for arm in (RIVAL, OURS) for start in (DEFAULT, SCRAMBLED)]
        if any(one is None for one in four):
            continue
        plain, hurt, ours, same = (t_interval(one.losses) for one in four if one is not None)
        lower = verdicts[f"{task}, {SCRAMBLED} start: {OURS} ends lower than {RIVAL}"]
        harm = verdicts[f"{task}: {RIVAL} ends lower from the default start than from the {SCRAMBLED} one"]
        rows.append(
            (
                task,
                plain.show(".3f"),
                ours.show(".3f"),
                "yes" if ours.mean <= plain.mean + plain.half_width else "no",
                hurt.show(".3f"),
                same.show(".3f"),
                "yes" if abs(same.mean - ours.mean) <= ours.half_width else "no",
                harm,
                lower,
            )
        )
    return Table(
        (
            "task",
            f"{RIVAL}, default",
            f"{OURS}, default",
            "within AdamW's interval or better",
            f"{RIVAL}, {SCRAMBLED}",
            f"{OURS}, {SCRAMBLED}",
            "as from the default start",
            "scrambling hurts AdamW",
            "gauge-fixed lower when scrambled",
        ),
        tuple(rows),
    )


def record(entries: Sequence[Entry], setting: Setting) -> Record:
    """Write entries as a record: a table by task and contender, and pairs of contenders on trial.

    Args:
        entries: what was measured.
        setting: how.
    """
    by = {(entry.start, entry.task, entry.arm): entry for entry in entries}
    starts = [start for start in STARTS if any(entry.start == start for entry in entries)]
    rows = tuple(
        (task, arm, *(by[start, task, arm].show() if (start, task, arm) in by else "–" for start in starts))
        for task in STEPS
        for arm in ARMS
        if any((start, task, arm) in by for start in starts)
    )
    done = {(task, arm) for _, task, arm in by}
    known = [arm for arm in ARMS if any(arm == one for _, one in done)]
    lacking = [arm for arm in ARMS if arm not in known]
    lacking += [f"{a} on {t}" for t in STEPS for a in known if t in ONLY.get(a, TASKS) and (t, a) not in done]
    lacking += [f"{start} starts" for start in STARTS if start not in starts]
    steps = "; ".join(f"{task} {max(1, STEPS[task] // setting.shrink)}" for task in STEPS)
    table = standing(by)
    return Record(
        name="optimizers",
        title="Optimizers from default starts, and from rescaled copies of them: mean test loss of fresh seeds",
        source="A comparison of this project, not of a paper",
        scale=setting.scale,
        paper=Table(("finding",), (("none: no paper makes this comparison",),)),
        ours=Table(("task", "contender", *(f"{start} start" for start in starts)), rows),
        differs=(
            "Tasks: 8 x 8 digits (MLP of three hidden layers, CNN, ResNet of 8 layers, transformer of 2 blocks), "
            "characters of Python's documentation (transformer of 2 blocks), and adapters of rank 4 beside a frozen "
            "MLP, which was trained on digits and now receives digits turned by 90 degrees.",
            "A scrambled 100 start is the default start, rescaled by random factors between 1/100 and 100, uniform in "
            "the logarithm (scrambled 10: between 1/10 and 10). Adapters are rescaled by their own gauge.",
            "Muon updates matrices; AdamW updates all other parameters, convolution kernels included, at a tenth of "
            "Muon's rate. G-SGD and G-Adam use the magnitude rule, G-SGD with max_multiplier=1.",
            "A balanced start is the same function in the gauge with the least sum of squares; a conditioned start, in "
            "the gauge with the least spread of the path kernel's diagonal. Plain AdamW trains from both. Path-SGD and "
            "conditioning need models whose outputs are sums over paths (Path-SGD: without maxima). LoRA+ and "
            "LoRA-RITE are for adapters.",
            *((f"Not run: {', '.join(lacking)}.",) if lacking else ()),
        ),
        protocol=(
            f"Batches of 32; the learning rate falls linearly to 0. Steps: {steps}. For each contender, task and "
            f"start, 8 rates by factors of about 3 are tried; the mean validation loss of {len(TUNING_SEEDS)} tuning "
            "seeds decides. The rate is in brackets; * marks a rate at the edge of the search.",
            f"Reported: mean test loss with its 95 % interval. {RIVAL} and {OURS} have {len(setting.seeds)} fresh "
            f"seeds from {DEFAULT} and {SCRAMBLED} starts (twice as many on {', '.join(CHEAP)}). All other cases have "
            f"{len(setting.seeds)} on {', '.join(CHEAP)} and for contenders of one task, and "
            f"{max(2, len(setting.seeds) // 2)} otherwise.",
            "A run that fails (not finite, ends above its start, or refused) counts as a guess.",
            f"The question is whether {OURS} ends lower than {RIVAL} from {SCRAMBLED} starts: p-values are corrected "
            f"for the {len(table.rows)} claims of this family. The claims that scrambling hurts {RIVAL}, the claims "
            "that it hurts SGD, and all others are three more families.",
            "Seeds 0 to 4 were used to find how many seeds are needed, and are not reported. On the ViT, all "
            "contenders were at chance level after 80 steps, so it has 200 steps.",
            *((f"Budgets were divided by {setting.shrink}.",) * (setting.shrink > 1)),
        ),
        claims=judged(claims_of(by)),
        caption="Mean test loss and 95 % interval by contender",
        data={
            # corrected for their number one by one: no rule for one family fits
            "families": 4,
            "standing": {"columns": table.columns, "rows": table.rows},
            "entries": [
                {"start": e.start, "task": e.task, "arm": e.arm, "lr": e.lr, "losses": e.losses} for e in entries
            ],
        },
        seconds=sum(one.seconds for entry in entries for one in entry.results),
    )


def run(setting: Setting) -> Record:
    """Run the contest; runs that are known are not run again."""
    journal = Journal((setting.folder or Path("runs")) / "optimizers.jsonl", setting.minutes)
    seeds = range(FIRST_SEED, FIRST_SEED + len(setting.seeds))
    return record(list(contest(journal.result, cases(), seeds, setting.shrink)), setting)


def draw(found: Record) -> Figure:
    """Draw one panel for each task: a row for each contender, a colour for each start."""
    entries = found.data["entries"]
    tasks = [task for task in STEPS if any(entry["task"] == task for entry in entries)]
    starts = [start for start in STARTS if any(entry["start"] == start for entry in entries)]
    arms = [arm for arm in ARMS if any(entry["arm"] == arm for entry in entries)]
    with panels(len(tasks), width=2.3, height=1.2 + 0.28 * len(arms)) as (figure, axes):
        for panel, task in zip(axes, tasks, strict=True):
            for place, start in enumerate(starts):
                mine = [e for e in entries if (e["task"], e["start"]) == (task, start)]
                spans = [t_interval(e["losses"]) for e in mine]
                panel.errorbar(
                    [span.mean for span in spans],
                    [arms.index(e["arm"]) + 0.18 * (place - (len(starts) - 1) / 2) for e in mine],
                    xerr=[span.half_width for span in spans],
                    linestyle="none",
                    markersize=3.5,
                    label=start,
                    **look(place),
                )
            panel.set(title=task, xscale="log", xlabel="test loss", ylim=(len(arms) - 0.4, -0.6))
            panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_yticks(range(len(arms)), arms if panel is axes[0] else [""] * len(arms))
        legend(figure, axes[0])
        return figure


OPTIMIZERS = Experiment(
    "optimizers",
    "optimizers from default, rescaled and unit-skeleton starts",
    90,
    "",
    run,
    draw,
    seeds=10,
    trials=False,
)

__all__ = ["OPTIMIZERS", "TUNING_SEEDS", "Entry", "Journal", "TimeIsUp", "cases", "contest", "draw", "record", "run"]
__all__ += ["standing"]
