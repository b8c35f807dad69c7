"""The page of the papers' recipes: what each table says and leaves open, and what is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..markdown import markdown_texts, page_of
from ..tuning import SEEDS, Setting
from .cells import FIELDS, NONE, UNSAID, Cell, load_cells, table_cells
from .compare import show
from .full import full_arms, listed, runnable


def render() -> str:
    """Return the page."""
    tables = dict.fromkeys(name.split("/")[0] for name in load_cells())
    return page_of("recipes/page.md", sections=map(_section, tables))


def _section(table: str) -> dict[str, Any]:
    cells = table_cells(table)
    first, every = next(iter(cells.values())), list(cells.values())
    rows, columns = (list(dict.fromkeys(place[i] for place in cells)) for i in (0, 1))
    # the longer side goes down
    places = [[(row, column) for column in columns] for row in rows]
    if len(columns) > len(rows):
        rows, columns, places = columns, rows, list(map(list, zip(*places, strict=True)))
    printed = [
        [name, *(cells[place].printed if place in cells else "–" for place in line)]
        for name, line in zip(rows, places, strict=True)
    ]
    reasons = dict.fromkeys(map(runnable, every))
    fields = [row for key in FIELDS if (row := _field(key, every))[1] != NONE]
    return {
        "first": first,
        "printed": markdown_texts(["", *columns], printed),
        "fields": markdown_texts(["field", "the paper", "--scale full"], fields),
        "named": ", ".join(FIELDS[key].lower() for key in first.by_reference),
        "reasons": [reason for reason in reasons if reason],
        "differ": _differ(table, cells) if "" in reasons else None,
    }


def _field(key: str, cells: Sequence[Cell]) -> list[str]:
    trained = (cell for cell in cells if not runnable(cell) and cell.recipe[key] == UNSAID)
    taken = _several(cell.value(key) for cell in trained)
    said = _several(cell.recipe[key] for cell in cells)
    return [FIELDS[key], said, "–" if key == "device" else taken]


def _several(values: Iterable[Any]) -> str:
    return "; ".join(dict.fromkeys(map(show, values))) or "–"


def _differ(table: str, cells: dict[tuple[str, str], Cell]) -> list[str]:
    # as many seeds as the paper has, where it says so
    said = next(iter(cells.values())).recipe["seeds"]
    seeds = SEEDS if said == UNSAID else tuple(range(said))
    setting = Setting(run=lambda _: [], scale="full", seeds=seeds)
    arms, _ = full_arms(table, setting)
    lines = listed([(cells[place], arm) for place, arm in arms.items()], setting)
    return list(dict.fromkeys(line.split(" (")[0] for line in lines if " in place of " in line))
