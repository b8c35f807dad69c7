"""The page of all statements, and the tables of those that are false or need a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..markdown import markdown_texts, page_of
from ..record import Table
from .evidence import Judged, Statement, Verdict

HEAD, ERRATA = ("statement", "verdict", "evidence"), ("statement", "right", "range", "evidence")
SHOWN: dict[Verdict, str] = {
    "true": "true",
    "changed": "true with a changed statement",
    "false": "false",
    "not shown": "does not show on a stand-in",
    "undecided": "undecided",
    "not tried": "not tried",
}


def render(judged: Sequence[Judged], records: Path) -> str:
    """Return the page."""
    by: dict[str, list[Judged]] = {}
    for one in judged:
        by.setdefault(one.statement.document, []).append(one)
    summary = ((name, *map(str, counts(some).values())) for name, some in by.items())
    return page_of(
        "statements/page.md",
        records=records.as_posix(),
        summary=Table(("document", *SHOWN.values()), tuple(summary)),
        documents={name: markdown_texts(HEAD, map(_row, some)) for name, some in by.items()},
    )


def counts(judged: Iterable[Judged]) -> dict[Verdict, int]:
    """Count the verdicts, in the order of :data:`SHOWN`."""
    found = Counter(one.verdict for one in judged)
    return {verdict: found[verdict] for verdict in SHOWN}


def in_words(judged: Iterable[Judged]) -> str:
    """Say how many statements there are of each verdict."""
    return ", ".join(f"{count} {SHOWN[verdict]}" for verdict, count in counts(judged).items())


def _row(one: Judged) -> tuple[str, ...]:
    statement = one.statement
    links = [
        f"[{Path(file).name.partition('#')[0]}]({file.removeprefix('docs/')})"
        for file in (*statement.pages, *statement.files)
    ]
    if statement.record and one.verdict != "not tried":
        links.append(f"[record](reproduction.md#{statement.record})")
    command = f"`{one.command}`" if one.command else ""
    evidence = " ".join(filter(None, (one.detail, *links, command)))
    return _named(statement), f"**{SHOWN[one.verdict]}**", evidence


def _named(statement: Statement) -> str:
    return f"**{statement.id}** ({statement.source}) {statement.says}"


def errata(statements: Iterable[Statement]) -> dict[str, str]:
    """Return a table for each document."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    for one in statements:
        if one.right:
            short = "False." if one.verdict == "false" else "Needs a change."
            evidence = [f"`{Path(test).name}`" for test in one.tests]
            evidence += [f"[{Path(name).name}]({name.removeprefix('docs/')})" for name in one.files]
            row = f"{_named(one)} **{short}**", one.right, one.range, " ".join(evidence)
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
