"""The page of all statements, and what the command prints of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import get_args

from ..markdown import markdown_table, markdown_texts
from ..record import Table
from .evidence import Judged
from .registry import Verdict

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
    return {verdict: found[verdict] for verdict in get_args(Verdict)}


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
    documents = dict.fromkeys(one.statement.document for one in judged)
    rows = []
    for name in documents:
        found = counts(one for one in judged if one.statement.document == name)
        rows.append((name, *map(str, found.values())))
    return markdown_table(Table(("document", *SHOWN.values()), tuple(rows)))


def _row(one: Judged) -> tuple[str, ...]:
    statement = one.statement
    what = f"**{statement.id}** ({statement.source}) {statement.says}"
    links = [
        f"[{Path(page).name.partition('#')[0]}]({page.removeprefix('docs/')})"
        for page in statement.pages
    ]
    links += [f"[{Path(file).name}]({file.removeprefix('docs/')})" for file in statement.files]
    links += [f"[record](reproduction.md#{statement.record})"] * bool(
        statement.record and one.verdict != "not tried"
    )
    command = f"`{one.command}`" if one.command else ""
    evidence = " ".join(filter(None, (one.detail, *links, command)))
    return what, f"**{SHOWN[one.verdict]}**", evidence


def in_words(judged: Iterable[Judged]) -> str:
    """Say how many statements there are of each verdict."""
    return ", ".join(f"{count} {SHOWN[verdict]}" for verdict, count in counts(judged).items())
