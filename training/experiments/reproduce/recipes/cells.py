"""The cells of the papers' tables and figures, read from their files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from pathspace.errors import InputError, expect_known

UNSAID, NONE = "unsaid", "none"
ROOT = resources.files("pathspace.training.experiments.reproduce.recipes")
# the fields of a recipe and their names in a sentence
FIELDS: dict[str, str] = tomllib.loads((ROOT / "fields.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Cell:
    """One cell of a table, or one curve or bar of a figure.

    Args:
        name: folder and file, such as ``path-space-table-1/smnist-28--g-sgd``.
        paper: title of the paper.
        place: table or figure.
        metric: what is printed.
        row: as printed.
        column: as printed.
        printed: the figures as printed; ``curve`` or ``bar`` where there are none.
        recipe: a value for every key of :data:`FIELDS`, :data:`UNSAID`
            where the paper says nothing.
        fill: what this library takes for what is unsaid.
        ours: how this library runs it: ``task`` and its options, or ``why`` it does not.
        by_reference: fields that the paper gives by naming another paper.
        note: what else there is to say.

    Raises:
        InputError: the recipe lacks a field, or has one that is none.
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

    def __post_init__(self) -> None:
        for what, keys in (("recipe", self.recipe), ("fill", self.fill)):
            for key in keys:
                expect_known(f"field of the {what} '{self.name}'", key, FIELDS)
        if lacking := [key for key in FIELDS if key not in self.recipe]:
            raise InputError(
                f"The recipe '{self.name}' lacks '{lacking[0]}'; give a value, or '{UNSAID}'."
            )

    def value(self, key: str) -> Any:
        """Return what the paper says of a field, or what this library
        takes where it says nothing.
        """
        said = self.recipe[key]
        return self.fill.get(key, UNSAID) if said == UNSAID else said


@cache
def load_cells() -> dict[str, Cell]:
    """Return all cells by name, table by table.

    Raises:
        InputError: a file is not a recipe.

    Example:
        >>> cell = load_cells()["path-space-table-1/smnist-28--g-sgd"]
        >>> cell.printed, cell.recipe["epochs"], cell.recipe["start"]
        ('1.50 ± 0.03', 400, 'unsaid')
    """
    cells = {}
    for folder in sorted(
        (entry for entry in ROOT.iterdir() if entry.is_dir()), key=lambda entry: entry.name
    ):
        files = {file.name: file for file in folder.iterdir() if file.name.endswith(".toml")}
        if "shared.toml" not in files:
            continue
        shared = tomllib.loads(files.pop("shared.toml").read_text(encoding="utf-8"))
        for name in sorted(files):
            own = tomllib.loads(files[name].read_text(encoding="utf-8"))
            cell = _cell(f"{folder.name}/{name.removesuffix('.toml')}", shared, own)
            cells[cell.name] = cell
    return cells


def table_cells(table: str) -> dict[tuple[str, str], Cell]:
    """Return the cells of a table by row and column.

    Args:
        table: name of its folder.

    Raises:
        InputError: there is no such table.

    Example:
        >>> table_cells("path-space-table-2")["SGD", "MNIST RCNN-32"].printed
        '0.38'
    """
    tables = dict.fromkeys(name.split("/")[0] for name in load_cells())
    expect_known("table", table, tables)
    return {
        (cell.row, cell.column): cell
        for name, cell in load_cells().items()
        if name.split("/")[0] == table
    }


def _cell(name: str, shared: dict[str, Any], own: dict[str, Any]) -> Cell:
    parts = {key: {**shared.get(key, {}), **own.get(key, {})} for key in ("recipe", "fill", "ours")}
    plain = {**shared, **own, **parts}
    plain["by_reference"] = tuple(plain.get("by_reference", ()))
    try:
        return Cell(name=name, **plain)
    except TypeError as error:
        raise InputError(
            f"The file of the recipe '{name}' lacks a key or has one too many ({error})."
        ) from error
