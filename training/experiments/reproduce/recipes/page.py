"""The page of the papers' recipes: what each table says, what it leaves open,
and what is done about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from ..experiment import SEEDS, Setting
from ..markdown import markdown_texts
from .cells import FIELDS, NONE, UNSAID, Cell, load_cells, table_cells
from .compare import show
from .full import full_arms, listed, runnable


def render() -> str:
    """Return the page."""
    tables = dict.fromkeys(name.split("/")[0] for name in load_cells())
    head = resources.files("pathspace.training.experiments.reproduce.recipes") / "page.md"
    return "\n".join([head.read_text(encoding="utf-8"), *(_section(name) for name in tables)])


def _section(table: str) -> str:
    cells = table_cells(table)
    first = next(iter(cells.values()))
    rows, columns = (list(dict.fromkeys(place[i] for place in cells)) for i in (0, 1))
    # the longer side goes down
    turned = len(columns) > len(rows)
    down, across = (columns, rows) if turned else (rows, columns)
    printed = [
        [one, *(_printed(cells, (other, one) if turned else (one, other)) for other in across)]
        for one in down
    ]
    parts = [
        f"## {first.place} of *{first.paper}*\n",
        f"Printed: {first.metric}.\n",
        markdown_texts(["", *across], printed),
    ]
    fields = [row for key in FIELDS if (row := _field(key, list(cells.values()))) is not None]
    parts.append(markdown_texts(["field", "the paper", "--scale full"], fields))
    if first.by_reference:
        named = ", ".join(FIELDS[key].lower() for key in first.by_reference)
        parts.append(f"By naming another paper: {named}.\n")
    if first.note:
        parts.append(f"{first.note}\n")
    parts += _left(table, cells)
    return "\n".join(parts)


def _printed(cells: dict[tuple[str, str], Cell], place: tuple[str, str]) -> str:
    return cells[place].printed if place in cells else "–"


def _field(key: str, cells: Sequence[Cell]) -> list[str] | None:
    said = _several(cell.recipe[key] for cell in cells)
    if said == NONE:
        return None
    trained = [cell for cell in cells if not runnable(cell)]
    taken = _several(cell.value(key) for cell in trained if cell.recipe[key] == UNSAID)
    return [FIELDS[key], said, "–" if key == "device" else taken]


def _several(values: Iterable[Any]) -> str:
    shown = list(dict.fromkeys(show(value) for value in values))
    return "; ".join(shown) if shown else "–"


def _left(table: str, cells: dict[tuple[str, str], Cell]) -> list[str]:
    why = dict.fromkeys(runnable(cell) for cell in cells.values() if runnable(cell))
    parts = [f"Not trained here, some or all: {reason}\n" for reason in why]
    if all(runnable(cell) for cell in cells.values()):
        return parts
    # as many seeds as the paper has, where it says so
    said = next(iter(cells.values())).recipe["seeds"]
    seeds = SEEDS if said == UNSAID else tuple(range(said))
    setting = Setting(run=lambda _: [], scale="full", seeds=seeds)
    arms, _ = full_arms(table, setting)
    lines = listed([(cells[place], arm) for place, arm in arms.items()], setting)
    differ = [line.split(" (")[0] for line in lines if " in place of " in line]
    return [
        *parts,
        "What `--scale full` does otherwise:\n",
        *(f"* {line}" for line in dict.fromkeys(differ)),
        "",
    ]
