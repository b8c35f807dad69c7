"""Verdicts that are computed: from the records of experiments, and from
figures of trained networks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pathspace.errors import expect_known
from pathspace.training.experiments.intervals import t_interval
from pathspace.training.experiments.reproduce.holm import seeds_needed
from pathspace.training.experiments.reproduce.recipes.compare import DATA
from pathspace.training.experiments.reproduce.record import Record
from pathspace.training.experiments.reproduce.statements.registry import Statement, Verdict

# what the judge of experiments says -> what it says of a statement; a difference
# that does not matter is none
OF_CLAIMS: dict[str, Verdict] = {
    "better": "true",
    "worse": "false",
    "no difference that matters": "false",
    "undecided": "undecided",
}
TURNED: dict[str, Verdict] = OF_CLAIMS | {"better": "false", "worse": "true"}
TAU = 3e-4
Figures = dict[str, Any]
Rule = Callable[[list[Figures], list[Figures]], list[float]]


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict.

    Args:
        statement: what was judged.
        verdict: the verdict.
        detail: what it rests on, or what is right instead, or why it was not tried.
    """

    statement: Statement
    verdict: Verdict
    detail: str


def judge_all(
    statements: Iterable[Statement], records: Path, figures: Path | None = None
) -> list[Judged]:
    """Give every statement its verdict.

    Args:
        statements: the statements.
        records: folder with the records of ``pathspace reproduce``.
        figures: figures of trained networks; by default ``data/markov.json``
            beside the folder of records.

    Returns:
        One entry per statement, in order.

    Raises:
        InputError: a record cannot be read, or a statement names a rule that is not there.
    """
    figures = figures or records.parent / "data" / "markov.json"
    known = json.loads(figures.read_text(encoding="utf-8")) if figures.is_file() else None
    found: dict[str, Record | None] = {}
    judged = []
    for statement in statements:
        if statement.record:
            if statement.record not in found:
                path = records / f"{statement.record}.json"
                found[statement.record] = Record.read(path) if path.is_file() else None
            judged.append(_by_record(statement, found[statement.record]))
        elif statement.measured:
            judged.append(_by_figures(statement, known))
        else:
            assert statement.verdict is not None
            judged.append(Judged(statement, statement.verdict, statement.right or statement.why))
    return judged


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a statement that holds where all its parts do:
    one that fails, or does not show, settles it.

    Example:
        >>> together(["true", "undecided"]), together(["undecided", "false"]), together([])
        ('undecided', 'false', 'not tried')
    """
    if not verdicts:
        return "not tried"
    strongest: tuple[Verdict, ...] = ("false", "not shown", "undecided")
    return next((verdict for verdict in strongest if verdict in verdicts), "true")


def _by_record(statement: Statement, record: Record | None) -> Judged:
    claims = [
        claim
        for claim in (record.claims if record else ())
        if statement.claims in claim["statement"]
        and not (statement.without and statement.without in claim["statement"])
    ]
    if record is None or not claims:
        return Judged(
            statement, "not tried", f"There is no record of it here; {statement.command} makes one."
        )
    meaning = TURNED if statement.reversed else OF_CLAIMS
    # where no arm beats simple means, a claim says nothing of the statement,
    # unless it is all there is
    telling = [claim for claim in claims if not claim["nothing"]] or claims
    verdicts = [meaning[claim["verdict"]] for claim in telling]
    other = _other_data(record, claims)
    if other:
        # other data tells whether the effect is there, and refutes nothing of the document's
        verdicts = ["not shown" if verdict == "false" else verdict for verdict in verdicts]
    verdict = together(verdicts)
    scale = other or (
        "" if record.scale == "full" else "On a stand-in for the document's data and models."
    )
    if statement.unsaid and len({*verdicts} - {"undecided"}) > 1:
        verdict, scale = "changed", f"The document does not say {statement.unsaid}. {scale}"
    parts = [
        f"{claim['statement']}: {claim['nothing'] or claim['verdict']}{_repetitions(claim)}"
        for claim in claims
    ]
    return Judged(statement, verdict, f"{'; '.join(parts)}. {scale}".rstrip())


def _other_data(record: Record, claims: Sequence[Mapping[str, Any]]) -> str:
    """Say which data stands in for the document's; empty where none does. Claims about a
    task begin with its name.
    """
    tasks = {claim["statement"].partition(":")[0] for claim in claims}
    own = tuple(f"Data: {DATA[task]} in place of" for task in tasks & DATA.keys())
    lines = [
        line.partition(" (")[0]
        for line in record.differs
        if line.startswith(own or "Data: ") and " in place of " in line
    ]
    return " ".join(f"On {line.removeprefix('Data: ')}" for line in dict.fromkeys(lines))


def _repetitions(claim: Mapping[str, Any]) -> str:
    wanted = claim["verdict"] == "undecided" and not claim["nothing"] and claim.get("needed")
    return f" (about {claim['needed']:,} seeds)" if wanted else ""


def _by_figures(statement: Statement, figures: Figures | None) -> Judged:
    expect_known("rule", statement.measured, RULES)
    if figures is None:
        return Judged(
            statement, "not tried", f"There are no figures here; {statement.command} measures them."
        )
    by_net = by_network(RULES[statement.measured], figures)
    verdicts = {name: sign(values) if values else "false" for name, values in by_net.items()}
    poor = _poor(figures) if statement.measured in PENALISED else {}
    parts = [
        f"{name}: {poor.get(name) or f'{verdict}{_seeds(by_net[name], verdict)}'}"
        for name, verdict in verdicts.items()
    ]
    data = figures.get("data", "digits")
    note = PENALISED.get(statement.measured, "")
    telling = [verdict for name, verdict in verdicts.items() if name not in poor]
    return Judged(
        statement,
        together(telling or ["undecided"]),
        f"By network: {', '.join(parts)}. {note}Small networks on {data}.",
    )


def _poor(figures: Figures) -> dict[str, str]:
    """Say which networks with the penal connection are no better than logistic regression:
    they decide nothing.
    """
    bar = figures.get("logistic", 0.0)
    means = by_network(lambda _, penal: [fmean(row["accuracy"] for row in penal)], figures)
    return {
        name: f"nothing, with the penal connection it is right on {mean:.1%}, logistic regression"
        f" on {bar:.1%}"
        for name, (mean,) in means.items()
        if mean <= bar
    }


def by_network(rule: Rule, figures: Figures) -> dict[str, list[float]]:
    """Apply a rule to the runs of each network: without the penal connection,
    and with it, seed by seed.
    """
    names = dict.fromkeys(row["network"] for row in figures["rows"])
    return {
        name: rule(
            *(
                [row for row in figures["rows"] if (row["network"], row["tau"]) == (name, tau)]
                for tau in (0.0, TAU)
            )
        )
        for name in names
    }


def sign(values: Sequence[float]) -> Verdict:
    """Judge "this is positive" by the 95 % interval of one value per seed.

    Example:
        >>> sign([1.0, 1.1, 0.9]), sign([-1.0, -1.1, -0.9]), sign([1.0, -1.1, 0.2])
        ('true', 'false', 'undecided')
    """
    interval = t_interval(values)
    if interval.mean - interval.half_width > 0:
        return "true"
    return "false" if interval.mean + interval.half_width < 0 else "undecided"


def _seeds(values: Sequence[float], verdict: Verdict) -> str:
    """How many seeds would decide, if the mean stays as it is."""
    if verdict != "undecided" or not fmean(values):
        return ""
    return f" (about {seeds_needed(stdev(values), abs(fmean(values))):,} seeds)"


def _difference(key: str) -> Rule:
    return lambda plain, penal: [b[key] - a[key] for a, b in zip(plain, penal, strict=True)]


# Each rule: runs without and with the penal connection -> one value per seed, positive if the
# statement is true; none where there is nothing to test, and the statement is false.
RULES: dict[str, Rule] = {
    "gradients_are_long": lambda plain, _: [
        row["trained"]["gradient_above_one"] - 0.5 for row in plain
    ],
    "raises_efficiency": _difference("efficiency"),
    "generalises": _difference("accuracy"),
    "efficient_without_help": lambda plain, _: [row["efficiency"] for row in plain],
    # random chains are those at the start
    "unfolds": lambda plain, penal: [
        a["start"]["fold"] - b["fold"] for a, b in zip(plain, penal, strict=True)
    ],
}
# rules that compare networks with and without the penal connection -> what is to be said of them
PENALISED = {
    "raises_efficiency": "",
    "generalises": "",
    "unfolds": (
        "Random chains are those at the start; training alone makes turns rarer, too. Turns are"
        " those of one image per seed. "
    ),
}
