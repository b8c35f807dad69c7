"""The base class of results: a table, text, HTML in a notebook, a dictionary for programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

# characters of a line, and of a value
WIDTH, CELL = 120, 90
SHORT = (bool, int, float, str)
# inherit the notebook's foreground, so that the text is readable in dark themes
PAGE = (
    '<pre style="white-space: pre; overflow-x: auto; line-height: 1.3; color: inherit">{code}</pre>'
)


class Shown:
    """A result: a data class with a row for each field, or with a text or table of its own."""

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        if type(self).__str__ is not Shown.__str__:
            return Text(str(self))
        rows = ((name, _cell(value)) for name, value in _fields(self).items())
        return text_table(type(self).__name__, ("", ""), rows)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name: results inside as dictionaries, tensors and models as they are."""
        return {name: _entry(value) for name, value in _fields(self).items()}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # (a data class would write one with all its tensors)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Shown.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """The fields that are numbers or texts, in one line; how many entries others have."""
        own = _fields(self)
        parts = []
        for name, value in own.items():
            if isinstance(value, SHORT):
                parts.append(f"{name}={shorten(repr(value), CELL)}")
            elif isinstance(value, Sized) and not hasattr(value, "shape"):
                parts.append(f"{name}=<{len(value):,}>")
        return f"{type(self).__name__}({', '.join(parts + ['...'] * (len(parts) < len(own)))})"

    def __str__(self) -> str:
        console = _console()
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _repr_html_(self) -> str:
        console = _console(record=True)
        console.print(self)
        return console.export_html(inline_styles=True, code_format=PAGE)


def shorten(text: str, most: int) -> str:
    """A text of at most so many characters, with dots where it was cut."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _fields(result: Any) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in fields(result) if field.repr}


def _entry(value: Any) -> Any:
    if isinstance(value, Shown):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _entry(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_entry(item) for item in value]
    return value


def _cell(value: Any) -> Text:
    """A value in at most a line: what is long by its size."""
    from rich.text import Text

    if isinstance(value, float):
        return Text(f"{value:.6g}")
    if (shape := getattr(value, "shape", None)) is not None:
        return Text(f"{type(value).__name__} of shape {tuple(shape)}")
    text = str(value) if isinstance(value, (*SHORT, type(None))) else repr(value)
    if len(text) > CELL and isinstance(value, Sized):
        text = f"{type(value).__name__} of {len(value)}"
    return Text(text if isinstance(value, str) else shorten(text, CELL))


def _console(record: bool = False) -> Console:
    import io

    from rich.console import Console

    return Console(width=WIDTH, no_color=True, record=record, file=io.StringIO())


def text_table(
    title: str | Text,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Sequence[int] = (),
) -> Table:
    """Rows of text under a title at the left; without headings, the first column names the rows."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    def plainly(text: str | Text) -> str | Text:
        return escape(text) if isinstance(text, str) else text

    headed = any(columns)
    table = Table(
        box=box.SIMPLE, title=plainly(title) or None, title_justify="left", show_header=headed
    )
    for number, column in enumerate(columns):
        table.add_column(
            column,
            overflow="fold",
            justify="right" if number in right else "left",
            style="" if headed or number else "bold",
        )
    for row in rows:
        table.add_row(*map(plainly, row))
    return table


def plain(value: Any) -> Any:
    """Values for JSON, at any depth; ``None`` for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
