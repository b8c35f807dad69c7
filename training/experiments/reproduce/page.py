"""The page of all experiments, written from their records alone."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from ..intervals import CONFIDENCE
from ..json_lines import read_lines
from .holm import LEVEL, MARGIN, POWER, gain, judge
from .markdown import markdown_table
from .record import Record, Table, on_these_items, percent
from .sequences import WIDER, WIDTH
from .timing import BOUND
from .trial import PARTS


def render(
    records: Iterable[Record], folder: str = "reproduction", journals: Path | None = None
) -> str:
    """Return the page."""
    known = list(records)
    head = resources.files("pathspace.training.experiments.reproduce") / "page.md"
    text = head.read_text(encoding="utf-8")
    parts = [text.format(folder=folder, **figures(known, journals))]
    if known:
        parts.append("## Verdicts\n\n" + _verdicts(known))
    parts += [_section(record, folder) for record in known]
    return "\n".join(parts)


def _verdicts(records: Sequence[Record]) -> str:
    rows = [
        (f"[{record.name}](#{record.name})", claim["statement"], _verdict(claim))
        for record in records
        for claim in record.claims
    ]
    table = markdown_table(Table(("experiment", "claim", "verdict"), tuple(rows)))
    open_claims = sum(
        claim["verdict"] == "undecided" for record in records for claim in record.claims
    )
    return f"{table}\n{len(rows)} claims, {open_claims} of them undecided.\n"


def _section(record: Record, folder: str) -> str:
    pieces = [
        f"## {record.name}\n",
        f"{record.title}. {record.source}.\n",
        f"```console\n$ {record.command}\n```\n",
        f"{_which(record)} took {record.seconds / 60:.1f} minutes on one thread.\n",
        *(
            [f"Computed with {_named(record.versions)}.\n"]
            if "processor" in record.versions
            else []
        ),
        "**The paper**\n",
        markdown_table(record.paper),
        "**Ours**\n",
        markdown_table(record.ours),
        "**Claims**\n",
        markdown_table(_claims(record)),
        f"![{record.caption}]({folder}/{record.name}.png)\n",
        f"*{record.caption}*\n",
        "**Protocol**\n",
        *(f"* {sentence}" for sentence in (*record.protocol, *_unrecorded(record))),
        "\n**What differs from the paper**\n",
        *(f"* {sentence}" for sentence in record.differs),
        "",
    ]
    return "\n".join(pieces)


def _claims(record: Record) -> Table:
    # column -> what it says of a claim
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "claim": lambda claim: str(claim["statement"]),
        "paper": lambda claim: _show(claim, "printed"),
        "ours": lambda claim: _show(claim, "mean"),
        f"{percent(CONFIDENCE)} interval": lambda claim: _interval(claim, "low", "high"),
        "other items": _items,
        "repetitions": lambda claim: str(claim["count"]),
        "p, zero": lambda claim: _p(claim["corrected"]),
        "p, margin": lambda claim: _p(claim["equivalence"]),
        "verdict": _verdict,
    }
    if not any(_with_items(claim) for claim in record.claims):
        del cells["other items"]
    rows = [tuple(write(claim) for write in cells.values()) for claim in record.claims]
    return Table(tuple(cells), tuple(rows))


def _which(record: Record) -> str:
    """The runs whose time a record states: a contest of optimizers counts those that it reports."""
    return (
        "The reported runs, without searches and pilot runs,"
        if "entries" in record.data
        else "All runs together"
    )


def _named(versions: dict[str, str]) -> str:
    kept = {
        # the first digits of a commit, with the plus of a tree that differed from it
        key: re.sub(r"\b(\w{12})\w+", r"\1", value) if key == "commit" else value
        for key, value in versions.items()
    }
    return ", ".join(f"{key} {value.replace(', ', ' and ')}" for key, value in kept.items())


def _show(claim: dict[str, Any], key: str) -> str:
    value = claim.get(key)
    return "–" if value is None else format(value, claim["pattern"])


def _interval(claim: dict[str, Any], low: str, high: str) -> str:
    return "–" if claim.get(low) is None else f"{_show(claim, low)} to {_show(claim, high)}"


def _items(claim: dict[str, Any]) -> str:
    return _interval(claim, "items_low", "items_high") if _with_items(claim) else "– (not recorded)"


def _unrecorded(record: Record) -> list[str]:
    """Say where the spread over test items is not known of any claim; times have no items."""
    if "times" in record.data or any(_with_items(claim) for claim in record.claims):
        return []
    return [
        "The spread over test items was not recorded: intervals and verdicts are for other seeds"
        " and the same test items."
    ]


def _with_items(claim: dict[str, Any]) -> bool:
    return claim.get("items_low") is not None


def _p(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _verdict(claim: dict[str, Any]) -> str:
    why = ""
    if claim["verdict"] == "undecided":
        why = (
            f": {claim['nothing']}"
            if claim["nothing"]
            else f", needs about {claim['needed']} repetitions" * bool(claim["needed"])
        )
    elif claim["verdict"] in ("better", "worse") and (claim["equivalence"] or 0) < LEVEL:
        why = ", by less than the margin"
    if on_these_items(claim):
        why += ", on these test items"
    return f"**{claim['verdict']}**{why}"


def figures(records: Iterable[Record], journals: Path | None = None) -> dict[str, object]:
    """Return the values of the fields in ``page.md``."""
    left: dict[str, list[dict[str, Any]]] = {}
    again: dict[str, list[dict[str, Any]]] = {}
    first = ""
    if journals is not None:
        for record in records:
            told, others = reported(record, journals)
            settings = set(map(_setting, told))
            left[record.name] = [run for run in others if _setting(run) not in settings]
            again[record.name] = [run for run in others if _setting(run) in settings]
            if record.name == "rcnn":
                first = _first_verdict(record, told, again[record.name])
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
        "language_runs": _count(left.get("language", [])),
        "smnist_runs": _count(left.get("smnist", [])),
        "smnist_best": _best(left.get("smnist", [])),
        "rcnn_first": first,
        "again": ", ".join(
            f"{_count(runs)} of {name}" for name, runs in sorted(again.items()) if runs
        )
        or "Other runs",
    }


def reported(record: Record, journals: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the runs of a journal that were evaluated on the test split: those that the record
    reports, and the others.

    A run is known by its result on the test split and its validation curve; of equal ones, the
    last is reported.
    """
    told = Counter(
        _result(test, curve)
        for arm in record.data.get("arms", ())
        for test, curve in zip(arm["tests"], arm["valid_metrics"], strict=True)
    )
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    for run in reversed(list(read_lines(journals / f"{record.name}-trials.jsonl"))):
        if run["trial"]["test"]:
            outcome = run["outcome"]
            result = _result(outcome["test_metric"], outcome["valid_metrics"])
            found[told[result] <= 0].append(run)
            told[result] -= 1
    return found


def _result(test: float | None, curve: Iterable[float | None]) -> tuple[float | None, ...]:
    """Return the test metric, and the curve with the digits of records."""
    return test, *(float(f"{v:.5g}") if v is not None and math.isfinite(v) else None for v in curve)


def _setting(run: dict[str, Any]) -> str:
    """Return a run's task, network and data."""
    return json.dumps([run["trial"]["task"], run["trial"]["options"]])


def _count(runs: list[dict[str, Any]]) -> str:
    return f"{len(runs)} runs" if runs else "runs"


def _best(runs: list[dict[str, Any]]) -> str:
    """Say what the best contender of these runs erred."""
    arms = defaultdict(list)
    for run in runs:
        trial = run["trial"]
        arms[trial["optimizer"], trial["init"]].append(run["outcome"]["test_metric"])
    least = min(map(fmean, arms.values()), default=None)
    return "" if least is None else f" (the best arm erred {100 * least:.1f} %)"


def _first_verdict(record: Record, told: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
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
