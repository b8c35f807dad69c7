"""The cells of the papers' tables and figures, read from one file per table.

A file has what all cells share (``recipe``, ``fill``, ``ours``), fields as words that the paper
leaves ``unsaid`` or a table has ``none`` of, a ``where`` for some rows and columns, and what is
``printed``: by row and column, or one word for the ``rows`` and ``columns`` of a figure.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from ...names import expect_known

UNSAID, NONE = "unsaid", "none"
ROOT = resources.files("pathspace.training.experiments.reproduce.recipes")
TABLES = ROOT / "tables"
# what all cells of a table have in common besides their recipes
PLAIN = ("paper", "place", "metric", "by_reference", "note")
# the fields of a recipe and their names in a sentence
FIELDS: dict[str, str] = tomllib.loads((ROOT / "fields.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Cell:
    """One cell of a table, or one curve or bar of a figure, named by table, row and column.

    ``recipe`` has a value for every key of :data:`FIELDS`, :data:`UNSAID` where the paper says
    nothing; ``fill`` is what this library takes there. ``ours`` is how it runs the cell, or ``why``
    it does not. ``by_reference`` are fields that the paper gives by naming another paper.
    """

    name: str
    paper: str
    place: str
    metric: str
    row: str
    column: str
    printed: str
    recipe: Mapping[str, Any]
    fill: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    by_reference: tuple[str, ...] = ()
    note: str = ""

    @property
    def error(self) -> float | None:
        """The error in percent, as it is printed or as an accuracy leaves it."""
        figures = re.findall(r"\d+\.?\d*", self.printed)
        if "accuracy" in self.metric:
            return round(100 - float(figures[-1]), 6)
        return float(figures[0]) if figures else None

    def value(self, key: str) -> Any:
        """Return what the paper says of a field, or what this library takes there."""
        said = self.recipe[key]
        return self.fill.get(key, UNSAID) if said == UNSAID else said


@cache
def load_cells() -> dict[str, Cell]:
    """Return all cells by name, table by table."""
    tables = sorted(file.name.removesuffix(".toml") for file in TABLES.iterdir())
    return {cell.name: cell for table in tables for cell in _cells(table)}


def table_cells(table: str) -> dict[tuple[str, str], Cell]:
    """Return the cells of a table by row and column."""
    tables = dict.fromkeys(name.split("/")[0] for name in load_cells())
    expect_known("table", table, tables)
    return {
        (cell.row, cell.column): cell
        for name, cell in load_cells().items()
        if name.split("/")[0] == table
    }


def _cells(table: str) -> Iterator[Cell]:
    """Put the cells of a table together: what all share, then each ``where`` that names the cell's
    row or column; a later value goes before an earlier one, a table's before those of the table
    that it is ``like``.
    """
    layers = _layers(table)
    shared = {key: value for layer in layers for key, value in layer.items() if key in PLAIN}
    shared["by_reference"] = tuple(shared.get("by_reference", ()))
    groups = [group for layer in layers for group in (layer, *layer.get("where", ()))]
    printed = layers[-1]["printed"]
    if isinstance(printed, str):
        printed = {row: dict.fromkeys(layers[-1]["columns"], printed) for row in layers[-1]["rows"]}
    for row, values in printed.items():
        for column, value in values.items():
            parts: dict[str, Any] = {"recipe": {}, "fill": {}, "ours": {}}
            for group in groups:
                if row in group.get("row", (row,)) and column in group.get("column", (column,)):
                    for word in (UNSAID, NONE):
                        parts["recipe"].update(dict.fromkeys(group.get(word, "").split(), word))
                    for key, part in parts.items():
                        part.update(group.get(key, {}))
            name = f"{table}/{_slug(row)}--{_slug(column)}"
            yield Cell(name=name, row=row, column=column, printed=value, **shared, **parts)


def _layers(table: str) -> list[dict[str, Any]]:
    """Read a table's file, after the files of the tables that it is like."""
    own = tomllib.loads((TABLES / f"{table}.toml").read_text(encoding="utf-8"))
    return [*(_layers(own["like"]) if "like" in own else ()), own]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
