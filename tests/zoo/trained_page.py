"""The figures of trained networks as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from benchmarks.figures import DOCS, page_of

from zoo.trained import TRAINED

DATA, PAGE = DOCS / "data" / "trained.json", DOCS / "trained.md"
Rows = Mapping[str, Mapping[str, dict[str, Any]]]


def size(value: float) -> str:
    """A small number."""
    return "0" if value == 0 else f"{value:.1e}"


def plain(text: str) -> str:
    """A sentence without folders of the machine that it was said on."""
    words = (word.split("site-packages/")[-1].split("/tests/")[-1] for word in text.split(" "))
    return " ".join(words)


def render(rows: Rows) -> str:
    """The page; the bound from above is that of the certificate, or of the page of brackets. Where
    a part failed, the page says so as where it was refused.
    """
    rows = {
        name: {part: facts | {"refused": facts["fault"]} if "fault" in facts else facts
               for part, facts in row.items()}
        for name, row in rows.items()
    }  # fmt: skip
    data = json.loads((DOCS / "data" / "brackets.json").read_text())
    brackets, most, unbounded = {row["name"]: row for row in data}, {}, {}
    for name, row in rows.items():
        certificate, bracket = row["certificate"], brackets.get(name, {})
        most[name] = certificate.get("units_at_most") or bracket.get("at_most")
        reason = bracket.get("evidence") or certificate.get("evidence")
        if most[name] is None and reason:
            unbounded[name] = reason
    texts = {name: row for name, row in rows.items() if "adapters" in row}
    facts = {"rows": rows, "texts": texts, "networks": TRAINED, "ln10": math.log(10)}
    return page_of("trained", **facts, most=most, unbounded=unbounded, size=size, plain=plain)
