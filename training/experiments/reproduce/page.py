"""The page of all experiments, written from their records alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..intervals import CONFIDENCE
from .holm import LEVEL
from .markdown import markdown_table
from .page_figures import figures
from .record import Record, Table, on_these_items, percent


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
