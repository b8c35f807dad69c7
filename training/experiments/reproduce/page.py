"""The pages of all experiments, from their records alone, of statements and of recipes."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ..intervals import CONFIDENCE
from ..json_lines import read_lines
from .holm import LEVEL, MARGIN, POWER, gain, judge
from .markdown import markdown_texts, page_of
from .recipes.cells import FIELDS, NONE, UNSAID, Cell, load_cells, table_cells
from .recipes.compare import show
from .recipes.full import full_arms, listed, runnable
from .record import Record, Table, on_these_items, percent
from .sequences import WIDER, WIDTH
from .statements.evidence import Judged, Statement, Verdict
from .timing import BOUND
from .trial import PARTS
from .tuning import SEEDS, Setting

Figures = dict[str, Any]


def render(
    records: Sequence[Record], folder: str = "reproduction", journals: Path | None = None
) -> str:
    """Return the page."""
    claims = [(record, claim) for record in records for claim in record.claims]
    rows = tuple(
        (f"[{record.name}](#{record.name})", claim["statement"], _verdict(claim))
        for record, claim in claims
    )
    return page_of(
        "page.md",
        folder=folder,
        records=records,
        verdicts=Table(("experiment", "claim", "verdict"), rows),
        open_claims=sum(claim["verdict"] == "undecided" for _, claim in claims),
        claims=_claims,
        named=_named,
        with_items=_with_items,
        **figures(records, journals),
    )


def _claims(record: Record) -> Table:
    # column -> what it says of a claim
    cells: dict[str, Callable[[Figures], str]] = {
        "claim": lambda claim: str(claim["statement"]),
        "paper": lambda claim: _show(claim, "printed"),
        "ours": lambda claim: _show(claim, "mean"),
        f"{percent(CONFIDENCE)} interval": lambda claim: _show(claim, "low", "high"),
        "other items": lambda claim: _show(
            claim, "items_low", "items_high", missing="– (not recorded)"
        ),
        "repetitions": lambda claim: str(claim["count"]),
        "p, zero": lambda claim: _p(claim["corrected"]),
        "p, margin": lambda claim: _p(claim["equivalence"]),
        "verdict": _verdict,
    }
    if not _with_items(record):
        del cells["other items"]
    rows = (tuple(write(claim) for write in cells.values()) for claim in record.claims)
    return Table(tuple(cells), tuple(rows))


def _with_items(record: Record) -> bool:
    return any(claim.get("items_low") is not None for claim in record.claims)


def _named(versions: dict[str, str]) -> str:
    # the first digits of a commit, with the plus of a tree that differed from it
    short = versions | {"commit": re.sub(r"\b(\w{12})\w+", r"\1", versions.get("commit", ""))}
    return ", ".join(f"{key} {short[key].replace(', ', ' and ')}" for key in versions)


def _show(claim: Figures, *keys: str, missing: str = "–") -> str:
    values = [claim.get(key) for key in keys]
    return missing if None in values else " to ".join(format(v, claim["pattern"]) for v in values)


def _p(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _verdict(claim: Figures) -> str:
    why = ""
    if claim["verdict"] == "undecided":
        needs = f", needs about {claim['needed']} repetitions" * bool(claim["needed"])
        why = f": {claim['nothing']}" if claim["nothing"] else needs
    elif claim["verdict"] in ("better", "worse") and (claim["equivalence"] or 0) < LEVEL:
        why = ", by less than the margin"
    return f"**{claim['verdict']}**{why}{', on these test items' * on_these_items(claim)}"


def figures(records: Iterable[Record], journals: Path | None = None) -> Figures:
    """Return the values of the fields in ``page.md``."""
    left: dict[str, list[Figures]] = defaultdict(list)
    again: dict[str, list[Figures]] = {}
    first = ""
    if journals is not None:
        for record in records:
            told, others = reported(record, journals)
            settings = set(map(_setting, told))
            left[record.name] = [run for run in others if _setting(run) not in settings]
            again[record.name] = [run for run in others if _setting(run) in settings]
            if record.name == "rcnn":
                first = _first_verdict(record, told, again[record.name])
    repeated = (f"{_count(runs)} of {name}" for name, runs in sorted(again.items()) if runs)
    return {
        "confidence": percent(CONFIDENCE),
        "margin": percent(MARGIN),
        "plain_margin": MARGIN,
        "one_in": round(1 / LEVEL),
        "power": percent(POWER),
        "parts": PARTS,
        "bound": percent(BOUND),
        "width": WIDTH,
        "wider": ", ".join(map(str, WIDER.values())),
        "language_runs": _count(left["language"]),
        "smnist_runs": _count(left["smnist"]),
        "smnist_best": _best(left["smnist"]),
        "rcnn_first": first,
        "again": ", ".join(repeated) or "Other runs",
    }


def reported(record: Record, journals: Path) -> tuple[list[Figures], list[Figures]]:
    """Return the runs of a journal that looked at the test split: those that the record reports,
    and the others. Of runs with equal results and curves, the last is reported.
    """
    told = Counter(
        _result(test, curve)
        for arm in record.data.get("arms", ())
        for test, curve in zip(arm["tests"], arm["valid_metrics"], strict=True)
    )
    found: tuple[list[Figures], list[Figures]] = [], []
    for run in reversed(list(read_lines(journals / f"{record.name}-trials.jsonl"))):
        if run["trial"]["test"]:
            result = _result(run["outcome"]["test_metric"], run["outcome"]["valid_metrics"])
            found[told[result] <= 0].append(run)
            told[result] -= 1
    return found


def _result(test: float | None, curve: Iterable[float | None]) -> tuple[float | None, ...]:
    """Return the test metric, and the curve with the digits of records."""
    return test, *(float(f"{v:.5g}") if v is not None and math.isfinite(v) else None for v in curve)


def _setting(run: Figures) -> str:
    return json.dumps([run["trial"]["task"], run["trial"]["options"]])


def _count(runs: list[Figures]) -> str:
    return f"{len(runs)} runs" if runs else "runs"


def _best(runs: list[Figures]) -> str:
    arms = defaultdict(list)
    for run in runs:
        trial = run["trial"]
        arms[trial["optimizer"], trial["init"]].append(run["outcome"]["test_metric"])
    return f" (the best arm erred {100 * min(map(fmean, arms.values())):.1f} %)" if arms else ""


def _first_verdict(record: Record, told: list[Figures], others: list[Figures]) -> str:
    """Judge the claim of two arms by other runs of its seeds, if all are there."""
    arms: dict[str, dict[int, float]] = defaultdict(dict)
    for run in others:
        arms[run["trial"]["optimizer"]][run["trial"]["seed"]] = run["outcome"]["test_metric"]
    (claim,), seeds = record.claims, {run["trial"]["seed"] for run in told}
    # (the first arm's runs are the first in the journal, and the last that were read)
    names = dict.fromkeys(run["trial"]["optimizer"] for run in reversed(told))
    if any(arms[name].keys() != seeds for name in names):
        return ""
    ours, rival = ([arms[name][seed] for seed in sorted(seeds)] for name in names)
    statement = gain(claim["statement"], ours, rival)
    (judged,) = judge([replace(statement, printed=claim["printed"])])
    low, mean, high = (format(v, claim["pattern"]) for v in (judged.low, judged.mean, judged.high))
    known = record.versions["processor"]
    elsewhere = sum(run["provenance"]["processor"] not in known for run in others)
    return (
        f" The first {_count(others)} ({elsewhere} of them on another kind of processor) gave"
        f" {mean} ({low} to {high}): **{judged.verdict}** (p = {judged.corrected:.3f})."
    )


HEAD, ERRATA = ("statement", "verdict", "evidence"), ("statement", "right", "range", "evidence")
SHOWN: dict[Verdict, str] = {
    "true": "true",
    "changed": "true with a changed statement",
    "false": "false",
    "not shown": "does not show on a stand-in",
    "undecided": "undecided",
    "not tried": "not tried",
}


def render_statements(judged: Sequence[Judged], records: Path) -> str:
    """Return the page."""
    by: dict[str, list[Judged]] = {}
    for one in judged:
        by.setdefault(one.statement.document, []).append(one)
    summary = ((name, *map(str, counts(some).values())) for name, some in by.items())
    return page_of(
        "statements/page.md",
        records=records.as_posix(),
        summary=Table(("document", *SHOWN.values()), tuple(summary)),
        documents={name: markdown_texts(HEAD, map(_statement, some)) for name, some in by.items()},
    )


def counts(judged: Iterable[Judged]) -> dict[Verdict, int]:
    """Count the verdicts, in the order of :data:`SHOWN`."""
    found = Counter(one.verdict for one in judged)
    return {verdict: found[verdict] for verdict in SHOWN}


def in_words(judged: Iterable[Judged]) -> str:
    """Say how many statements there are of each verdict."""
    return ", ".join(f"{count} {SHOWN[verdict]}" for verdict, count in counts(judged).items())


def _statement(one: Judged) -> tuple[str, ...]:
    statement = one.statement
    links = [
        f"[{Path(file).name.partition('#')[0]}]({file.removeprefix('docs/')})"
        for file in (*statement.pages, *statement.files)
    ]
    if statement.record and one.verdict != "not tried":
        links.append(f"[record](reproduction.md#{statement.record})")
    command = f"`{one.command}`" if one.command else ""
    evidence = " ".join(filter(None, (one.detail, *links, command)))
    return _source(statement), f"**{SHOWN[one.verdict]}**", evidence


def _source(statement: Statement) -> str:
    return f"**{statement.id}** ({statement.source}) {statement.says}"


def errata(statements: Iterable[Statement]) -> dict[str, str]:
    """Return a table for each document."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    for one in statements:
        if one.right:
            short = "False." if one.verdict == "false" else "Needs a change."
            evidence = [f"`{Path(test).name}`" for test in one.tests]
            evidence += [f"[{Path(name).name}]({name.removeprefix('docs/')})" for name in one.files]
            row = f"{_source(one)} **{short}**", one.right, one.range, " ".join(evidence)
            rows.setdefault(one.id[0], []).append(row)
    return {letter: markdown_texts(ERRATA, found) for letter, found in rows.items()}


def with_tables(page: str, statements: Iterable[Statement]) -> str:
    """Return a page with today's tables between its marks; a page without marks stays."""
    for letter, table in errata(statements).items():
        start, end = f"<!-- statements {letter} -->\n", f"<!-- end {letter} -->"
        if start in page and end in page:
            before, rest = page.split(start, 1)
            page = f"{before}{start}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return page


def render_recipes() -> str:
    """Return the page."""
    tables = dict.fromkeys(name.split("/")[0] for name in load_cells())
    return page_of("recipes/page.md", sections=map(_section, tables))


def _section(table: str) -> dict[str, Any]:
    cells = table_cells(table)
    first, every = next(iter(cells.values())), list(cells.values())
    rows, columns = (list(dict.fromkeys(place[i] for place in cells)) for i in (0, 1))
    # the longer side goes down
    places = [[(row, column) for column in columns] for row in rows]
    if len(columns) > len(rows):
        rows, columns, places = columns, rows, list(map(list, zip(*places, strict=True)))
    printed = [
        [name, *(cells[place].printed if place in cells else "–" for place in line)]
        for name, line in zip(rows, places, strict=True)
    ]
    reasons = dict.fromkeys(map(runnable, every))
    fields = [row for key in FIELDS if (row := _field(key, every))[1] != NONE]
    return {
        "first": first,
        "printed": markdown_texts(["", *columns], printed),
        "fields": markdown_texts(["field", "the paper", "--scale full"], fields),
        "named": ", ".join(FIELDS[key].lower() for key in first.by_reference),
        "reasons": [reason for reason in reasons if reason],
        "differ": _differ(table, cells) if "" in reasons else None,
    }


def _field(key: str, cells: Sequence[Cell]) -> list[str]:
    trained = (cell for cell in cells if not runnable(cell) and cell.recipe[key] == UNSAID)
    taken = _several(cell.value(key) for cell in trained)
    said = _several(cell.recipe[key] for cell in cells)
    return [FIELDS[key], said, "–" if key == "device" else taken]


def _several(values: Iterable[Any]) -> str:
    return "; ".join(dict.fromkeys(map(show, values))) or "–"


def _differ(table: str, cells: dict[tuple[str, str], Cell]) -> list[str]:
    # as many seeds as the paper has, where it says so
    said = next(iter(cells.values())).recipe["seeds"]
    seeds = SEEDS if said == UNSAID else tuple(range(said))
    setting = Setting(run=lambda _: [], scale="full", seeds=seeds)
    arms, _ = full_arms(table, setting)
    lines = listed([(cells[place], arm) for place, arm in arms.items()], setting)
    return list(dict.fromkeys(line.split(" (")[0] for line in lines if " in place of " in line))
