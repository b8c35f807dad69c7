"""``optimizers``: a leaderboard from default starts, from rescaled copies of
them, and from unit skeletons.

The question comes first: is AdamW in the canonical gauge as good as AdamW from default starts, and
better where the start was rescaled? Then come all other contenders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from ..intervals import CONFIDENCE, t_interval
from ..names import texts
from .experiment import Setting
from .holm import POWER, Claim, judge
from .leaderboard_contest import (
    DEFAULT,
    FINALISTS,
    FURTHER,
    ORDER,
    OURS,
    PILOT_SEEDS,
    RIVAL,
    SCRAMBLED,
    Case,
    Entry,
    asked,
    cases,
    compared,
    contest,
    hurts,
    pairs,
    statement,
)
from .leaderboard_run import ARMS, ONLY, SIMPLE, STARTS, rates
from .leaderboard_tasks import BATCH, CHUNKS, LENGTH, RANK, STEPS, TASKS, UPRIGHT
from .pictures import legend, look, panels
from .recipes.compare import FASHION_TESTS
from .record import Record, Table, about, judged, percent, remarks


def claims_of(by: Mapping[Case, Entry]) -> list[tuple[Claim, ...]]:
    """The claims on trial, in families that are corrected apart: the question, what it
    presumes twice, all others.

    A claim decides nothing where neither contender beats the linear model: where both 95 %
    intervals reach its mean.
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


def standing(by: Mapping[Case, Entry]) -> Table:
    """The question by task: is the gauge as good, the same from rescaled starts, and better?"""
    short: dict[str, str] = {"better": "yes", "worse": "no"}
    verdicts = {
        claim.statement: short.get(claim.verdict, claim.verdict) for claim in chain(*claims_of(by))
    }
    rows = []
    for task in ORDER:
        plain, hurt, ours, same = (
            t_interval(by[start, task, arm].losses)
            for arm in (RIVAL, OURS)
            for start in (DEFAULT, SCRAMBLED)
        )
        rows.append(
            (
                task,
                t_interval(by[DEFAULT, task, SIMPLE].losses).show(".3f"),
                plain.show(".3f"),
                ours.show(".3f"),
                "yes" if ours.mean <= plain.mean + plain.half_width else "no",
                hurt.show(".3f"),
                same.show(".3f"),
                "yes" if abs(same.mean - ours.mean) <= ours.half_width else "no",
                verdicts[hurts(task, RIVAL)],
                verdicts[statement(task, SCRAMBLED, RIVAL)],
            )
        )
    return Table(
        (
            "task",
            SIMPLE,
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
    counts = sorted(len(by[case].results) for case in asked())
    table = standing(by)
    large, small = (start.split()[1] for start in STARTS[1:3])
    tried = rates(RIVAL)
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
        protocol=(
            (
                f"Batches of {BATCH[setting.scale]}; the learning rate falls linearly to 0. Steps:"
                f" {steps}. For each contender, task and start, a tuning seed tries {len(tried)}"
                f" rates by factors of about {tried[1] / tried[0]:.0f}, from {SCRAMBLED} starts"
                f" {len(rates(RIVAL, SCRAMBLED))}, and up to {FURTHER} further ones while the best"
                " lies at an edge or the lowest fails. Another seed tries the best"
                f" {FINALISTS}; the mean validation loss of both decides. The rate is in"
                " brackets; * marks a rate at the edge of the search."
            ),
            f"Reported: mean test loss of fresh seeds with its {percent(CONFIDENCE)} interval. "
            + (
                f"Seeds {PILOT_SEEDS[0]} to {PILOT_SEEDS[-1]} at the chosen rates say how many"
                f" seeds decide each claim with a probability of {percent(POWER)}, at least"
                f" {len(setting.seeds)}"
                f"{f' and at most {setting.most_seeds}' if setting.most_seeds else ''}; they are"
                " not reported. The spread of the seeds after them may ask for more. "
                if setting.by_power
                else ""
            )
            + f"Contenders in claims have {counts[0]} to {counts[-1]} seeds. "
            + f"All others have {max(2, len(setting.seeds) // 2)}.",
            (
                f"The {SIMPLE} is linear in the image, or a table of pairs of characters; AdamW"
                " trains it in as many steps. It is the bar for what a network is worth at all,"
                " and no contender of the comparison; a claim decides nothing where both"
                " contenders are above it."
            ),
            "A run that fails (not finite, ends above its start, or refused) counts as a guess.",
            (
                f"The question is whether {OURS} ends lower than {RIVAL} from {SCRAMBLED} starts:"
                f" p-values are corrected for the {len(table.rows)} claims of this family. The"
                f" claims that scrambling hurts {RIVAL}, the claims that it hurts SGD, and all"
                " others are three more families."
            ),
            *((f"Budgets were divided by {setting.shrink}.",) * (setting.shrink > 1)),
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
