"""Pages and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .record import Table

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)


def page_of(template: str, **fields: object) -> str:
    """Fill a template of this folder."""
    return TEMPLATES.get_template(template).render(fields, table=markdown_table)


def sentences(name: str, **fields: object) -> tuple[str, ...]:
    """Fill the lines of a macro in ``sentences.md``."""
    macro = getattr(TEMPLATES.get_template("sentences.md").module, name)
    return tuple(line for line in str(macro(**fields)).splitlines() if line)


def markdown_table(table: Table) -> str:
    """A table in Markdown; columns of numbers are aligned right, unless they come first."""

    def numbers(cells: Iterable[str]) -> bool:
        return not any(cell[:1].isalpha() or cell[:1] in ("*", "[") for cell in cells)

    columns = list(zip(*table.rows, strict=True))
    rule = markdown_row(["---", *("---:" if numbers(cells) else "---" for cells in columns[1:])])
    return "\n".join([markdown_row(table.columns), rule, *map(markdown_row, table.rows), ""])


def markdown_texts(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of texts in Markdown; all columns are aligned left."""
    return "\n".join([*map(markdown_row, (head, ["---"] * len(head), *rows)), ""])


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
