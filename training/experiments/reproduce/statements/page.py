"""The page of all statements, and the tables of those that are false or need a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from ..markdown import markdown_table, markdown_texts
from ..record import Table
from .evidence import Judged, Statement, Verdict

ERRATA = ("statement", "right", "range", "evidence")
SHOWN: dict[Verdict, str] = {
    "true": "true",
    "changed": "true with a changed statement",
    "false": "false",
    "not shown": "does not show on a stand-in",
    "undecided": "undecided",
    "not tried": "not tried",
}


def counts(judged: Iterable[Judged]) -> dict[Verdict, int]:
    """Count the verdicts, in the order of :data:`SHOWN`."""
    found = Counter(one.verdict for one in judged)
    return {verdict: found[verdict] for verdict in SHOWN}


def render(judged: Sequence[Judged], records: Path) -> str:
    """Return the page."""
    head = resources.files("pathspace.training.experiments.reproduce.statements") / "page.md"
    parts = [head.read_text(encoding="utf-8").format(records=records.as_posix()), "\n"]
    if judged:
        parts.append(_summary(judged))
    for document in dict.fromkeys(one.statement.document for one in judged):
        rows = [_row(one) for one in judged if one.statement.document == document]
        table = markdown_texts(("statement", "verdict", "evidence"), rows)
        parts.append(f"\n## {document}\n\n{table}")
    return "".join(parts)


def _summary(judged: Sequence[Judged]) -> str:
    rows = []
    for name in dict.fromkeys(one.statement.document for one in judged):
        found = counts(one for one in judged if one.statement.document == name)
        rows.append((name, *map(str, found.values())))
    return markdown_table(Table(("document", *SHOWN.values()), tuple(rows)))


def _row(one: Judged) -> tuple[str, ...]:
    statement = one.statement
    what = f"**{statement.id}** ({statement.source}) {statement.says}"
    links = [
        f"[{Path(file).name.partition('#')[0]}]({file.removeprefix('docs/')})"
        for file in (*statement.pages, *statement.files)
    ]
    links += [f"[record](reproduction.md#{statement.record})"] * bool(
        statement.record and one.verdict != "not tried"
    )
    command = f"`{one.command}`" if one.command else ""
    evidence = " ".join(filter(None, (one.detail, *links, command)))
    return what, f"**{SHOWN[one.verdict]}**", evidence


def in_words(judged: Iterable[Judged]) -> str:
    """Say how many statements there are of each verdict."""
    return ", ".join(f"{count} {SHOWN[verdict]}" for verdict, count in counts(judged).items())


def errata(statements: Iterable[Statement]) -> dict[str, str]:
    """Return a table for each document."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    for one in statements:
        if one.right:
            short = "False." if one.verdict == "false" else "Needs a change."
            what = f"**{one.id}** ({one.source}) {one.says} **{short}**"
            evidence = [f"`{Path(test).name}`" for test in one.tests]
            evidence += [f"[{Path(name).name}]({name.removeprefix('docs/')})" for name in one.files]
            rows.setdefault(one.id[0], []).append((what, one.right, one.range, " ".join(evidence)))
    return {letter: markdown_texts(ERRATA, found) for letter, found in rows.items()}


def with_tables(page: str, statements: Iterable[Statement]) -> str:
    """Return a page with today's tables between its marks; a page without marks stays."""
    for letter, table in errata(statements).items():
        start, end = f"<!-- statements {letter} -->\n", f"<!-- end {letter} -->"
        if start in page and end in page:
            before, rest = page.split(start, 1)
            page = f"{before}{start}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return page
