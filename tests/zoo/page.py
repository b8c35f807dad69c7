"""The survey as a page: `python -m zoo.page` from `tests/` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.figures import DOCS, page_of

from pathspace.files.writing import replacing

DATA, PAGE = DOCS / "data" / "survey.json", DOCS / "survey.md"
SOUND = 1e-8
# outputs that rounding the weights to 16 digits changes by more than that, and by how much
ROUNDED = {("starnet_s3", "eval"): 7.3e-8}


def keep(rows: Iterable[dict[str, Any]], data: Path, page: Path, text: str) -> None:
    """Write rows of data, one on each line, and the page made of them, each aside and renamed."""
    with replacing(data) as temporary:
        temporary.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    with replacing(page) as temporary:
        temporary.write_text(text)


def sound(row: dict[str, Any]) -> bool:
    """Whether what was measured is as small as it has to be."""
    return max(row["rescaling"], row["balance"] or 0) <= SOUND


def render(rows: Iterable[dict[str, Any]]) -> str:
    """The page."""
    return page_of("survey", rows=list(rows), rounded=ROUNDED, sound=sound)


if __name__ == "__main__":
    kept = json.loads(DATA.read_text())
    keep(kept, DATA, PAGE, render(kept))
