"""Tables of pages in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .record import Table


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
