"""Where the figures of pages are kept, and how they get onto the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load(name: str) -> dict[str, Any]:
    """Figures kept so far."""
    path = DOCS / "data" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(name: str, figures: dict[str, Any]) -> None:
    """Keep figures; called after every row, so that a run that breaks off loses nothing."""
    (DOCS / "data" / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def written(page: str, name: str, table: str) -> str:
    """The page with a table between ``<!-- figures: NAME -->`` and ``<!--
    end of figures: NAME -->``.
    """
    begin, end = f"<!-- figures: {name} -->", f"<!-- end of figures: {name} -->"
    return filled((DOCS / page).read_text(), begin, end, f"\n{table}\n")


def filled(text: str, begin: str, end: str, inside: str) -> str:
    """A text with something else between two marks."""
    before, rest = text.split(begin)
    return before + begin + inside + end + rest.split(end, 1)[1]


def write(page: str, name: str, table: str) -> None:
    """Put a table onto its page."""
    (DOCS / page).write_text(written(page, name, table))


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table; all columns after the first are aligned right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
