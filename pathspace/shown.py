"""The base class of results: a table in a terminal, text in ``str``, HTML in a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 120
SHORT = (bool, int, float, str)
# inherit the notebook's foreground, so that the text is readable in dark themes
PAGE = (
    '<pre style="white-space: pre; overflow-x: auto; line-height: 1.3; color: inherit">{code}</pre>'
)


class Shown:
    """A result that defines its table in :meth:`__rich__`."""

    def __rich__(self) -> RenderableType:
        # (not abstract: results are data classes, some with other bases)
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # (a data class would write one with all its tensors)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Shown.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """The fields that are numbers or short texts, in one line."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.repr}  # type: ignore[arg-type]
        kept = {name: value for name, value in own.items() if isinstance(value, SHORT)}
        parts = [f"{name}={value!r:.80}" for name, value in kept.items()]
        return f"{type(self).__name__}({', '.join(parts + ['...'] * (len(kept) < len(own)))})"

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


def plain(value: Any) -> Any:
    """Values for JSON, at any depth: lists for tuples and tensors, and ``None`` for
    numbers that are not finite.

    Example:
        >>> plain({"sizes": (1, math.inf), 2: math.nan})
        {'sizes': [1, None], '2': None}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
