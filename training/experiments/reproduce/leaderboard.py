"""``optimizers``: a leaderboard from default and rescaled starts, and from unit skeletons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from ..intervals import CONFIDENCE, t_interval
from ..names import texts
from .holm import POWER, Claim, gain, judge, seeds_needed
from .leaderboard_run import (
    ARMS,
    BATCH,
    CHUNKS,
    LENGTH,
    ONLY,
    RANK,
    SIMPLE,
    STARTS,
    STEPS,
    TASKS,
    UPRIGHT,
    Result,
    Run,
    chance,
    rates,
)
from .markdown import sentences
from .pictures import legend, look, panels
from .recipes.compare import FASHION_TESTS
from .record import Record, Table, about, judged, percent, remarks
from .tuning import TUNING_SEEDS, Setting

OURS, RIVAL = "gauge-fixed AdamW", "AdamW"
DEFAULT, SCRAMBLED = STARTS[:2]
KINDS = (RIVAL, "SGD", "Muon", "LoRA+")
ORDER = tuple(TASKS)
# these seeds say how many others a verdict needs, and are not reported
PILOT_SEEDS = range(5)
# a second tuning seed tries so many rates
FINALISTS = 3
# a search that ends at its edge goes on for so many rates
FURTHER = 6


@dataclass(frozen=True)
class Entry:
    """A contender's results on fresh seeds; ``edge``: the rate is an end of those tried."""

    start: str
    task: str
    arm: str
    lr: float
    results: tuple[Result, ...]
    scale: str = "embedded"
    edge: bool = False

    @property
    def losses(self) -> list[float]:
        """Test loss by seed; a run that failed counts as a guess."""
        guess = chance(self.task, self.scale)
        return [guess if one.failed else one.test for one in self.results]

    def show(self) -> str:
        """Mean and interval, the rate (* at the edge of the search), failed runs."""
        failed = sum(one.failed for one in self.results)
        return (
            f"{t_interval(self.losses).show('.3f')}"
            f" ({self.lr:g}{'*' * self.edge}{f', {failed} failed' if failed else ''})"
        )


Case = tuple[str, str, str]


def cases() -> Iterator[Case]:
    """Start, task and contender of all that is compared."""
    for task in ORDER:
        for arm in ARMS:
            if task in ONLY.get(arm, TASKS):
                for start in STARTS if arm != SIMPLE else (DEFAULT,):
                    yield start, task, arm


def pairs() -> Iterator[tuple[str, str, Case, Case]]:
    """All claims: the family, the statement, the case that ends lower, and the other one."""
    for task in ORDER:
        yield "better", *of_gauge(task, SCRAMBLED, RIVAL)
    for arm in (RIVAL, "SGD"):
        for task in ORDER:
            yield f"{arm} hurt", hurts(task, arm), (DEFAULT, task, arm), (SCRAMBLED, task, arm)
    for task in ORDER:
        for start in (DEFAULT, SCRAMBLED):
            for kind in KINDS:
                if (start, kind) != (SCRAMBLED, RIVAL) and task in ONLY.get(kind, TASKS):
                    yield "other", *of_gauge(task, start, kind)


def asked() -> set[Case]:
    """The cases that claims are about."""
    return {case for *_, ours, rival in pairs() for case in (ours, rival)}


def compared(what: str, ours: Entry, rival: Entry) -> Claim:
    """The claim that the first entry ends lower, not yet corrected for others."""
    losses = list(zip(ours.losses, rival.losses, strict=False))
    return gain(what, [a for a, _ in losses], [b for _, b in losses])


def of_gauge(task: str, start: str, kind: str) -> tuple[str, Case, Case]:
    """The claim that the gauge is better, with both cases."""
    fixed = f"gauge-fixed {kind}"
    statement = f"{task}, {start} start: {fixed} ends lower than {kind}"
    return statement, (start, task, fixed), (start, task, kind)


def hurts(task: str, arm: str) -> str:
    """The claim that rescaling hurts."""
    return f"{task}: {arm} ends lower from the {DEFAULT} start than from the {SCRAMBLED} one"


def contest(chosen: Sequence[Case], setting: Setting) -> list[Entry]:
    """Tune and test contenders.

    A tuning seed tries all rates, and further ones while the best lies at an edge or the lowest
    fails; another seed tries the best three. With ``setting.by_power``, pilot seeds at that rate
    say how many fresh seeds each pair of a claim needs; if these spread more, their spread says how
    many more.
    """
    tried, best = search(chosen, setting)

    def entries(seeds: Mapping[Case, Iterable[int]]) -> dict[Case, Entry]:
        found = results({(case, rate): list(seeds[case]) for case, rate in best.items()}, setting)
        return {
            case: Entry(
                *case, rate, ended, setting.scale, rate in (tried[case][0], tried[case][-1])
            )
            for (case, rate), ended in found.items()
            if ended
        }

    def fresh() -> dict[Case, Entry]:
        first = len(PILOT_SEEDS)
        return entries({case: range(first, first + counts[case]) for case in best})

    least, claimed = len(setting.seeds), asked()
    counts = {case: least if case in claimed else max(2, least // 2) for case in best}
    if setting.by_power:
        pilot = entries({case: PILOT_SEEDS if case in claimed else () for case in best})
        counts |= seeds_by_power(pilot, pilot, least, setting.most_seeds)
        counts |= seeds_by_power(pilot, fresh(), least, setting.most_seeds)
    return list(fresh().values())


def results(
    wanted: Mapping[tuple[Case, float], Sequence[int]], setting: Setting
) -> dict[tuple[Case, float], tuple[Result, ...]]:
    """Carry out runs: case and rate, with seeds."""
    runs = {}
    for ((start, task, arm), lr), seeds in wanted.items():
        steps = setting.budget(STEPS[setting.scale][task])
        runs[(start, task, arm), lr] = [
            Run(task, start, arm, lr, seed, steps, setting.scale) for seed in seeds
        ]
    every = list(dict.fromkeys(run for some in runs.values() for run in some))
    known = dict(zip(every, setting.run(every), strict=True))
    return {key: tuple(known[run] for run in some) for key, some in runs.items()}


def search(
    chosen: Sequence[Case], setting: Setting
) -> tuple[dict[Case, tuple[float, ...]], dict[Case, float]]:
    """The rates that were tried, and the best one of each case."""

    def ranked(
        wanted: Mapping[Case, Sequence[float]], seeds: Sequence[int]
    ) -> dict[Case, list[float]]:
        """The rates of each case, the best first."""
        rated = {(case, lr): seeds for case, some in wanted.items() for lr in some}
        losses = {
            key: fmean(math.inf if one.failed else one.valid for one in some)
            for key, some in results(rated, setting).items()
        }
        return {
            case: sorted(some, key=lambda lr: (losses[case, lr], lr))
            for case, some in wanted.items()
        }

    tried = {case: rates(case[2], case[0]) for case in chosen}
    first = ranked(tried, TUNING_SEEDS[:1])
    for _ in range(FURTHER):
        lowest = results({(case, tried[case][0]): TUNING_SEEDS[:1] for case in first}, setting)
        more = {
            case: further(tried[case], best, lowest[case, tried[case][0]][0].failed)
            for case, (best, *_) in first.items()
        }
        more = {case: some for case, some in more.items() if some != tried[case]}
        if not more:
            break
        tried |= more
        first |= ranked(more, TUNING_SEEDS[:1])
    few = {case: some[:FINALISTS] for case, some in first.items()}
    return tried, {case: best for case, (best, *_) in ranked(few, TUNING_SEEDS).items()}


def further(tried: tuple[float, ...], best: float, fails: bool) -> tuple[float, ...]:
    """Rates with one more where the search may have ended too early."""
    # (their factors alternate)
    if fails or best == tried[0]:
        return (float(f"{tried[0] * tried[1] / tried[2]:.3g}"), *tried)
    if best == tried[-1]:
        return (*tried, float(f"{tried[-1] * tried[-2] / tried[-3]:.3g}"))
    return tried


def seeds_by_power(
    pilot: Mapping[Case, Entry], spread: Mapping[Case, Entry], least: int, most: int | None = None
) -> dict[Case, int]:
    """How many seeds decide each pair of a claim with a probability of 80 %.

    The effect to be found is the margin, or half of what the pilot shows where that is larger. The
    spread is that of the pilot's entries, or of the first fresh seeds (an internal pilot study,
    Wittes and Brittain, 1990): no number is below theirs.
    """
    counts: dict[Case, int] = {}
    families = Counter(family for family, *_ in pairs())
    for family, what, ours, rival in pairs():
        if ours in pilot and rival in pilot and ours in spread and rival in spread:
            shown, found = (compared(what, one[ours], one[rival]) for one in (pilot, spread))
            effect = max(shown.margin, abs(shown.mean) / 2)
            needed = seeds_needed(found.error * math.sqrt(found.count), effect, families[family])
            needed = min(needed, most or needed)
            for case in (ours, rival):
                have = len(spread[case].results) if spread is not pilot else least
                counts[case] = max(counts.get(case, least), have, needed)
    return counts


def claims_of(by: Mapping[Case, Entry]) -> list[tuple[Claim, ...]]:
    """The claims on trial, in families that are corrected apart: the question, what it presumes
    twice, all others. A claim decides nothing where both 95 % intervals reach the linear model's
    mean.
    """
    families: dict[str, list[Claim]] = {}
    for family, what, ours, rival in pairs():
        claim = compared(what, by[ours], by[rival])
        spans = [t_interval(by[case].losses) for case in (ours, rival)]
        bar = t_interval(by[DEFAULT, ours[1], SIMPLE].losses).mean
        if min(span.mean + span.half_width for span in spans) >= bar:
            claim = replace(claim, nothing=f"neither beats the {SIMPLE}")
        families.setdefault(family, []).append(claim)
    return [judge(family) for family in families.values()]


def standing(by: Mapping[Case, Entry], claims: Iterable[Claim]) -> Table:
    """The question by task: is the gauge as good, the same from rescaled starts, and better?"""
    short: dict[str, str] = {"better": "yes", "worse": "no"}
    verdicts = {claim.statement: short.get(claim.verdict, claim.verdict) for claim in claims}
    rows = []
    for task in ORDER:
        simple, plain, hurt, ours, same = (
            t_interval(by[start, task, arm].losses)
            for start, arm in (
                (DEFAULT, SIMPLE),
                (DEFAULT, RIVAL),
                (SCRAMBLED, RIVAL),
                (DEFAULT, OURS),
                (SCRAMBLED, OURS),
            )
        )
        cells: dict[str, Any] = {
            "task": task,
            SIMPLE: simple.show(".3f"),
            f"{RIVAL}, default": plain.show(".3f"),
            f"{OURS}, default": ours.show(".3f"),
            "within AdamW's interval or better": ours.mean <= plain.mean + plain.half_width,
            f"{RIVAL}, {SCRAMBLED}": hurt.show(".3f"),
            f"{OURS}, {SCRAMBLED}": same.show(".3f"),
            "as from the default start": abs(same.mean - ours.mean) <= ours.half_width,
            "scrambling hurts AdamW": verdicts[hurts(task, RIVAL)],
            "gauge-fixed lower when scrambled": verdicts[of_gauge(task, SCRAMBLED, RIVAL)[0]],
        }
        words: dict[Any, str] = {True: "yes", False: "no"}
        rows.append(tuple(words.get(cell, cell) for cell in cells.values()))
    return Table(tuple(cells), tuple(rows))


def record(entries: Sequence[Entry], setting: Setting) -> Record:
    """Write entries as a record: a table by task and contender, and pairs on trial."""
    by = {(entry.start, entry.task, entry.arm): entry for entry in entries}
    rows = tuple(
        (
            task,
            arm,
            *(by[start, task, arm].show() if (start, task, arm) in by else "–" for start in STARTS),
        )
        for task in ORDER
        for arm in ARMS
        if task in ONLY.get(arm, TASKS)
    )
    steps = "; ".join(
        f"{task} {setting.budget(number)}" for task, number in STEPS[setting.scale].items()
    )
    families = claims_of(by)
    table = standing(by, chain(*families))
    large, small = (start.split()[1] for start in STARTS[1:3])
    return Record(
        **about("optimizers"),
        scale=setting.scale,
        ours=Table(("task", "contender", *(f"{start} start" for start in STARTS)), rows),
        differs=(
            texts()["optimizers"]["tasks"][setting.scale].format(
                images=FASHION_TESTS,
                characters=CHUNKS[setting.scale][2] * LENGTH,
                rank=RANK[setting.scale],
                upright=UPRIGHT,
            ),
            *remarks("optimizers", large=large, small=small),
        ),
        protocol=sentences(
            "optimizers",
            setting=setting,
            batch=BATCH[setting.scale],
            steps=steps,
            tried=rates(RIVAL),
            lower=rates(RIVAL, SCRAMBLED),
            further=FURTHER,
            finalists=FINALISTS,
            confidence=percent(CONFIDENCE),
            pilot=PILOT_SEEDS,
            power=percent(POWER),
            counts=sorted(len(by[case].results) for case in asked()),
            claims=len(table.rows),
            scrambled=SCRAMBLED,
            simple=SIMPLE,
            ours=OURS,
            rival=RIVAL,
        ),
        claims=judged([*chain(*families)]),
        data={
            # how many claims each of them has: p-values are corrected for that number
            "families": [len(family) for family in families],
            "standing": {"columns": table.columns, "rows": table.rows},
            "entries": [
                {"start": e.start, "task": e.task, "arm": e.arm, "lr": e.lr, "losses": e.losses}
                for e in entries
            ],
        },
        seconds=sum(one.seconds for entry in entries for one in entry.results),
    )


def run(setting: Setting) -> Record:
    """Run the contest; runs that are known are not run again."""
    return record(contest(list(cases()), setting), setting)


def draw(found: Record) -> Figure:
    """Draw one panel for each task: a row for each contender, a colour for each start."""
    entries, arms = found.data["entries"], list(ARMS)
    with panels(len(ORDER), width=2.3, height=1.2 + 0.28 * len(ARMS)) as (figure, axes):
        for panel, task in zip(axes, ORDER, strict=True):
            for place, start in enumerate(STARTS):
                mine = [e for e in entries if (e["task"], e["start"]) == (task, start)]
                spans = [t_interval(e["losses"]) for e in mine]
                panel.errorbar(
                    [span.mean for span in spans],
                    [arms.index(e["arm"]) + 0.18 * (place - (len(STARTS) - 1) / 2) for e in mine],
                    xerr=[span.half_width for span in spans],
                    linestyle="none",
                    markersize=3.5,
                    label=start,
                    **look(place),
                )
            panel.set(title=task, xscale="log", xlabel="test loss", ylim=(len(arms) - 0.4, -0.6))
            low, high = panel.get_xlim()
            narrow = high < 2.5 * low
            panel.xaxis.set_major_locator(
                MaxNLocator(3) if narrow else LogLocator(subs=(1.0, 2.0, 3.0, 5.0))
            )
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_yticks(range(len(arms)), arms if panel is axes[0] else [""] * len(arms))
        legend(figure, axes[0])
        return figure
