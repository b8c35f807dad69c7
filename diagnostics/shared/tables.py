"""Tables of frozen records: their comparison, and export to CSV, JSON, data
frames and TensorBoard scalars.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeGuard, TypeVar

from pathspace.errors import InputError, UnsupportedError, expect_arguments
from pathspace.files.writing import replacing
from pathspace.shown import Shown
from pathspace.shown import plain as plain

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Record = TypeVar("Record")


class ScalarWriter(Protocol):
    """A writer of scalars, such as ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Write one number."""


@dataclass(frozen=True)
class Estimate(Shown):
    """A number measured with random probes.

    Attributes:
        value: the estimate.
        error: its standard error.
        samples: number of independent samples.

    Example:
        >>> low, high = Estimate(1.0, 0.1, 20).interval()
        >>> round(low, 2), round(high, 2)
        (0.79, 1.21)
    """

    value: float
    error: float
    samples: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Student's confidence interval of the mean.

        Args:
            level: probability with which the interval covers the true value, for
                normally distributed samples.

        Returns:
            Lower and upper end; infinite with fewer than two samples.
        """
        from scipy.stats import t

        if self.error == 0:
            return self.value, self.value
        if self.samples < 2:
            return -math.inf, math.inf
        low, high = t.interval(level, self.samples - 1, self.value, self.error)
        return float(low), float(high)

    def agrees(self, truth: float, sigmas: float = 4.0) -> bool:
        """Whether ``truth`` is within ``sigmas`` standard errors (and rounding) of the estimate."""
        return bool(
            abs(self.value - truth) <= sigmas * self.error + 1e-9 * max(abs(truth), abs(self.value))
        )

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """Mean and standard error of independent samples."""
        count = len(samples)
        mean = math.fsum(samples) / count
        square = math.fsum((sample - mean) ** 2 for sample in samples)
        return cls(mean, math.sqrt(square / (count - 1) / count) if count > 1 else math.inf, count)


@dataclass(frozen=True)
class Table(Shown, Generic[Record]):
    """Records of one kind, in order, with notes about them.

    Attributes:
        title: the content of the table.
        rows: frozen records.
        notes: one sentence for each part that does not apply or was omitted.

    Example:
        >>> table = Table("errors", (Estimate(1.0, 0.5, 4), Estimate(2.0, 0.25, 4)))
        >>> len(table), table.column("error")
        (2, [0.5, 0.25])
        >>> print(table.to_csv().replace(chr(13), ""), end="")
        value,error,samples
        1.0,0.5,4
        2.0,0.25,4
    """

    title: str
    rows: tuple[Record, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.rows)

    def __getitem__(self, key: int | str) -> Record:
        """A row by number, or the first whose first field is ``key``."""
        if isinstance(key, int):
            return self.rows[key]
        for name, row in zip(self.row_names(), self.rows, strict=True):
            if name == key:
                return row
        raise InputError(
            f"The table {self.title!r} found no row {key!r}; its rows are"
            f" {_listed(self.row_names())}."
        )

    def row_names(self) -> list[str]:
        """The names of the rows, in order."""
        return [str(getattr(row, fields(row)[0].name)) for row in self.rows]  # type: ignore[arg-type]

    @property
    def columns(self) -> list[str]:
        """Names of the columns; the fields of nested records are joined with a dot."""
        return list(dict.fromkeys(name for row in self.to_dicts() for name in row))

    def column(self, name: str) -> list[Any]:
        """The values of one column."""
        if self.rows and name not in self.columns:
            raise InputError(
                f"The table {self.title!r} found no column {name!r}; its columns are"
                f" {_listed(self.columns)}."
            )
        return [row.get(name) for row in self.to_dicts()]

    def to_dicts(self) -> list[dict[str, Any]]:
        """One flat dictionary per row."""
        return [_flatten(asdict(row)) for row in self.rows]  # type: ignore[call-overload]

    def to_frame(self) -> Any:
        """The table as a ``pandas.DataFrame``.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UnsupportedError(
                "to_frame() needs pandas, which is not installed; install it, or use to_dicts(),"
                " to_csv() or to_json()."
            ) from error
        return pandas.DataFrame(self.to_dicts(), columns=self.columns)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table as CSV text, also written to ``path`` if one is given.

        Args:
            path: file to replace.

        Returns:
            The text.

        Raises:
            InputError: the file cannot be written.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(
            {key: _cell(value) for key, value in row.items()} for row in self.to_dicts()
        )
        return _write(text.getvalue(), path)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table as strict JSON text (numbers that are not finite become ``null``),
        also written to ``path``.

        Args:
            path: file to replace.

        Returns:
            The text.

        Raises:
            InputError: the file cannot be written.
        """
        content = {"title": self.title, "rows": self.to_dicts(), "notes": list(self.notes)}
        return _write(json.dumps(plain(content), indent=2, allow_nan=False) + "\n", path)

    def to_tensorboard(self, writer: ScalarWriter, step: int | None = None) -> int:
        """Write every finite number as ``title/row/column``.

        Args:
            writer: a ``SummaryWriter``.
            step: the training step of the table.

        Returns:
            The number of scalars that were written.
        """
        written = 0
        for key, row in zip(self.row_names(), self.to_dicts(), strict=True):
            for name, value in row.items():
                if _is_number(value) and math.isfinite(value):
                    writer.add_scalar(f"{self.title}/{key}/{name}", float(value), step)
                    written += 1
        return written

    def changes(
        self, after: Table[Record], quantities: Sequence[str] | None = None
    ) -> Table[Change]:
        """The numbers of this table beside those of a later one: of another run, or checkpoint.

        Rows are matched by their first field; the notes name rows that are in one table only.

        Args:
            after: the later table, of the same kind.
            quantities: columns to compare; all columns of numbers by default.

        Returns:
            One row per row and column of numbers.

        Raises:
            InputTypeError: ``after`` is not a table.

        Example:
            >>> old, new = (
            ...     Table("t", (Change("a", "loss", value, 1.0, None),)) for value in (2.0, 3.0)
            ... )
            >>> old.changes(new, ["before"])[0].ratio
            1.5
        """
        expect_arguments("changes", table=after)
        rows: list[Change] = []
        first, second = (dict(zip(_numbered(t), t.to_dicts(), strict=True)) for t in (self, after))
        for key, old in first.items():
            for name, value in old.items():
                other = second.get(key, {}).get(name)
                wanted = quantities is None or name in quantities
                if wanted and _is_number(value) and _is_number(other):
                    ratio = float(other) / value if value else None
                    rows.append(Change(key, name, float(value), float(other), ratio))
        notes = [
            f"Only the {which} table has {_listed(sorted(extra))}."
            for which, extra in (
                ("first", first.keys() - second.keys()),
                ("second", second.keys() - first.keys()),
            )
            if extra
        ]
        return Table(f"{self.title}: before and after", tuple(rows), tuple(notes))

    def _shown(self) -> dict[str, list[str]]:
        """Cells by column, for people: an estimate in one cell, and no empty columns."""
        rows = [
            _flatten({field.name: _estimated(getattr(row, field.name)) for field in fields(row)})  # type: ignore[arg-type]
            for row in self.rows
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        cells = {name: [_cell(row.get(name), short=True) for row in rows] for name in names}
        return {name.replace("_", " "): column for name, column in cells.items() if any(column)}

    def __rich__(self) -> RichTable:
        # (not at the top: its import draws one of Python's random numbers)
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable

        shown = RichTable(
            title=self.title,
            box=SIMPLE_HEAD,
            padding=0,
            caption="\n".join(self.notes) or None,
            caption_justify="left",
        )
        columns = self._shown()
        for number, name in enumerate(columns):
            shown.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
        for row in zip(*columns.values(), strict=True):
            shown.add_row(*row)
        return shown

    def _repr_html_(self) -> str:
        columns = self._shown()
        lines = [columns, *zip(*columns.values(), strict=True)]
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in lines
        )
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return (
            f'<div style="overflow-x: auto"><table><caption>{escape(self.title)}</caption>{rows}'
            f"</table>{notes}</div>"
        )


@dataclass(frozen=True)
class Change:
    """One number of a table before and after.

    Attributes:
        row: the row's name.
        quantity: the column.
        before: value in the first table.
        after: value in the second.
        ratio: after / before, or ``None`` if before is 0.
    """

    row: str
    quantity: str
    before: float
    after: float
    ratio: float | None


def _numbered(table: Table[Any]) -> list[str]:
    """Names of the rows; repeated names get a count."""
    seen: dict[str, int] = {}
    names = []
    for key in table.row_names():
        seen[key] = seen.get(key, 0) + 1
        names.append(key if seen[key] == 1 else f"{key} ({seen[key]})")
    return names


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _estimated(value: Any) -> Any:
    if isinstance(value, Estimate):
        return f"{value.value:.4g} ± {value.error:.1g}" if value.error else value.value
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _cell(value: Any, short: bool = False) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and short:
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " ".join(_cell(item, short) for item in value)
    return str(value)


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return (
        shown + (f" and {len(names) - most} more" if len(names) > most else "") if names else "none"
    )


def _write(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="")
    return text
