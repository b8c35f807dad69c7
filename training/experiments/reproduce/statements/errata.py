"""The tables on the page of errata: every statement that is false or needs a change."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..markdown import markdown_texts
from .registry import Statement

COLUMNS = ("statement", "right", "range", "evidence")


def tables(statements: Iterable[Statement]) -> dict[str, str]:
    """Return a table for each document."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    for one in statements:
        if one.right:
            rows.setdefault(one.id[0], []).append(
                (
                    f"**{one.id}** ({one.source}) {one.says} **{_short(one)}**",
                    one.right,
                    one.range,
                    " ".join([*map(_test, one.tests), *map(_file, one.files)]),
                )
            )
    return {letter: markdown_texts(COLUMNS, found) for letter, found in rows.items()}


def with_tables(page: str, statements: Iterable[Statement]) -> str:
    """Return a page with today's tables between its marks; a page without marks stays."""
    for letter, table in tables(statements).items():
        start, end = f"<!-- statements {letter} -->\n", f"<!-- end {letter} -->"
        if start in page and end in page:
            before, rest = page.split(start, 1)
            page = f"{before}{start}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return page


def _short(statement: Statement) -> str:
    return "False." if statement.verdict == "false" else "Needs a change."


def _test(name: str) -> str:
    file, _, test = name.partition("::")
    return f"`{Path(file).name}::{test}`"


def _file(name: str) -> str:
    return f"[{Path(name).name}]({name.removeprefix('docs/')})"
