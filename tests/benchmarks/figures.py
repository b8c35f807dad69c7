"""Where the figures of pages are kept, and how they get onto the pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from pathspace.files.writing import replacing, write_text

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load(name: str) -> Any:
    """Figures kept so far; an empty dictionary where there are none."""
    path = DOCS / "data" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def keep(name: str, figures: Any) -> None:
    """Keep figures; called after every row, so that a run that breaks off loses nothing."""
    write_text(json.dumps(figures, indent=1), str(DOCS / "data" / f"{name}.json"))


def each(
    name: str, held: dict[str, Any], part: str, rows: Iterable[str], measured: Callable[[str], Any]
) -> None:
    """Measure rows of a part of the figures, and keep each as soon as it is there."""
    for row in rows:
        held.setdefault(part, {})[row] = measured(row)
        print(row, held[part][row], flush=True)
        keep(name, held)


def chosen(names: Sequence[str], rows: Iterable[str]) -> list[str]:
    """The rows that are named; all of them without names."""
    return [row for row in rows if row in names or not names]


def written(page: str, name: str, table: str) -> str:
    """The page with a table between the marks of a name."""
    begin, end = f"<!-- figures: {name} -->", f"<!-- end of figures: {name} -->"
    before, rest = (DOCS / page).read_text(encoding="utf-8").split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}"


def shows(page: str, name: str, table: str) -> bool:
    """Whether a page has this table."""
    return (DOCS / page).read_text(encoding="utf-8") == written(page, name, table)


def write(page: str, name: str, table: str) -> None:
    """Put a table onto its page."""
    text = written(page, name, table)
    with replacing(DOCS / page) as temporary:
        temporary.write_text(text, encoding="utf-8")


def page_of(template: str, **facts: Any) -> str:
    """A page from its template in `tests/pages`; functions among the facts are filters and tests
    of it as well.
    """
    folder = FileSystemLoader(Path(__file__).resolve().parents[1] / "pages")
    pages = Environment(loader=folder, trim_blocks=True, keep_trailing_newline=True)
    functions = {key: fact for key, fact in facts.items() if callable(fact)}
    pages.filters |= functions
    pages.tests |= functions
    pages.filters["shown"] = format
    return pages.get_template(f"{template}.md").render(facts)


def markdown(head: str, rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table under a line of headings, `first | second`; all columns after the first ones, which
    are texts, are aligned right.
    """
    rule = [*["---"] * texts, *["---:"] * (head.count(" | ") + 1 - texts)]
    return "\n".join(f"| {' | '.join(line)} |" for line in ([head], rule, *rows))
