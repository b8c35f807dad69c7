"""Fill the page "How it compares" with the records that are there when the site is built, so that it is never old.

Records: the leaderboard of optimizers (``docs/reproduction/optimizers.json``), the times of steps
(``docs/data/benchmarks.json``), rounded weights (``docs/data/equalise.json``), and from every file in ``docs/data`` the
entries of ``head_to_head``: ``{"against": ..., "what": ..., "ours": ..., "theirs": ...}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
MARK = "<!-- comparisons -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs once for each page."""
    return markdown.replace(MARK, measured(DOCS)) if MARK in markdown else markdown


def measured(docs: Path) -> str:
    """The tables, from the records in a folder."""
    parts = [others(docs / "data"), optimizers(docs / "reproduction/optimizers.json")]
    parts += [steps(docs / "data/benchmarks.json"), rounded(docs / "data/equalise.json")]
    return "\n\n".join(filter(None, parts))


def others(folder: Path) -> str:
    """Every head to head of the records."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        record = read(path)
        for entry in record.get("head_to_head", ()) if isinstance(record, dict) else ():
            file = f"[{path.name}](data/{path.name})"
            rows.append([entry["against"], entry["what"], entry["ours"], entry["theirs"], file])
    return section(
        "Other tools", ["other tool", "what was measured", "pathspace", "the tool", "record"], rows
    )


def optimizers(path: Path) -> str:
    """The paired tests of the leaderboard."""
    rows = [
        [claim["statement"], " to ".join(format(claim[end], claim["pattern"]) for end in ("low", "high")),
         f"{claim['corrected']:.2g}", claim["verdict"]]
        for claim in (read(path) or {}).get("claims", ())
    ]  # fmt: skip
    heads = ["statement", "reduction of the test loss (95 % interval)", "p after Holm", "verdict"]
    return section("Optimizers", heads, rows)


def steps(path: Path) -> str:
    """How long a step takes, as a multiple of what it is compared with."""
    record = read(path) or {}
    rows = [
        [kind, row["model"], f"{row[key]:.3f}"]
        for part, key, kind in (
            ("gauge_fixed", "fixed/adamw", "gauge-fixed AdamW / AdamW"),
            ("training", "gsgd/sgd", "G-SGD / SGD"),
            ("training", "gadam/adam", "G-Adam / Adam"),
        )
        for row in record.get(part, ())
    ]
    return section("Time of a training step", ["optimizers", "model", "ratio of times"], rows)


def rounded(path: Path) -> str:
    """Signal to noise of outputs with rounded weights, for every way that was tried."""
    rows = [row for rows in (read(path) or {}).values() for row in rows]
    skip = ("change", "float")
    ways = list(
        dict.fromkeys(
            key for row in rows for key in row if key not in skip and isinstance(row[key], float)
        )
    )
    ways = [way for way in ways if ": " not in way]
    body = [
        [
            row["model"],
            str(row["bits"]),
            row["per"],
            *(f"{row[way]:.1f}" if way in row else "-" for way in ways),
        ]
        for row in rows
    ]
    return section(
        "Rounded weights: ratio of signal to noise in dB",
        ["model", "bits", "one step per", *ways],
        body,
    )


def section(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A heading and a table; nothing without rows."""
    lines = [" | ".join(row) for row in rows]
    if not lines:
        return ""
    return "\n".join([f"## {title}", "", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
                     + [f"| {line} |" for line in lines])  # fmt: skip


def read(path: Path) -> Any:
    """A record, or nothing."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
