"""Results that show themselves: as a table in a terminal, as text in ``str``, as HTML in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 120
# the notebook's own colours, so that dark themes stay readable
PAGE = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.3; color: inherit">{code}</pre>'


class Shown:
    """A result with a table of its own, :meth:`__rich__`."""

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def __str__(self) -> str:
        console = _console()
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _repr_html_(self) -> str:
        console = _console(record=True)
        console.print(self)
        return console.export_html(inline_styles=True, code_format=PAGE)


def _console(record: bool = False) -> Console:
    import io

    from rich.console import Console

    return Console(width=WIDTH, no_color=True, record=record, file=io.StringIO())
