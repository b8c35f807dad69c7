"""Bracket the number of units of every model here: found, and at most. Goes on where it stopped.

`python -m zoo.brackets [NAME or FAMILY ...] [--seconds 60]` from `tests/` writes the page as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer
from benchmarks.figures import DOCS, page_of

from pathspace.errors import PathspaceError, first_line
from pathspace.evidence.bench import Workbench, bench_copy
from pathspace.evidence.upper_bound import upper_bound
from pathspace.models.running import cast
from pathspace.reduction import trace
from zoo.entry import Built
from zoo.entry import load as load_zoo
from zoo.packaged import available
from zoo.page import keep
from zoo.trained import TRAINED
from zoo.trained import load as load_trained

DATA, PAGE = DOCS / "data" / "brackets.json", DOCS / "brackets.md"


def closed(row: Mapping[str, Any]) -> bool:
    """Whether nothing was missed."""
    return row["at_most"] is not None and row["at_most"] <= row["found"]


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    return page_of("brackets", rows=rows, closed=closed)


# --- measuring


# beyond that many scalars the samples alone would take too long
LARGE = 20_000_000
KEPT = ("at_most", "exact_found", "exact_at_most", "seconds", "evidence", "left_over")


Maker = Callable[[], Built]


def tasks() -> Iterator[tuple[str, str, str, Maker]]:
    """Name, family and mode of all that can be built here, and how: with small inputs where a
    model takes any size.
    """
    for entry in load_zoo().values():
        for mode in entry.modes:
            yield entry.name, entry.family, mode, partial(entry.make, mode, small=True)
    for name, network in TRAINED.items():
        if available(*network.packages):
            yield name, "trained", "eval", partial(load_trained, name)


def bracket(make: Maker, seconds: float) -> dict[str, Any]:
    """Found and at most, or why not."""
    found: dict[str, Any] = {"scalars": 0, "found": None, **dict.fromkeys(KEPT)}
    start = time.perf_counter()
    try:
        model, args, kwargs = make()
        found["scalars"] = sum(parameter.numel() for parameter in model.parameters())
        if found["scalars"] > LARGE:
            reason = f"not attempted: {found['scalars']:,} scalars, more than {LARGE:,}"
            return {**found, "evidence": reason, "seconds": 0.0}
        graph = trace(model, *args, kwargs=kwargs, sizes="given")
        found["found"] = graph.num_units
        copy, dtype = bench_copy(model, graph, (args, kwargs))
        bench = Workbench(graph, copy, cast((args, kwargs), dtype))
        bound = upper_bound(bench, most_seconds=seconds).to_dict()
    except PathspaceError as error:
        bound = {"evidence": f"not attempted: {first_line(error).split(' (at ')[0]}"[:300]}
    except Exception as error:
        bound = {"evidence": f"fault: {type(error).__name__}: {first_line(error)}"[:300]}
    bound["seconds"] = round(time.perf_counter() - start, 1)
    return found | {name: bound.get(name) for name in KEPT}


def main(
    wanted: Annotated[list[str] | None, typer.Argument(help="Names or families.")] = None,
    seconds: Annotated[float, typer.Option(help="What the samples of a model may take.")] = 60.0,
) -> None:
    """Measure what is named, or else what is missing, and write data and page."""
    rows = {(row["name"], row["mode"]): row for row in json.loads(DATA.read_text())}
    for name, family, mode, make in tasks():
        if {name, family} & set(wanted) if wanted else (name, mode) not in rows:
            torch.manual_seed(0)
            about = {"name": name, "family": family, "mode": mode}
            row = rows[name, mode] = about | bracket(make, seconds)
            print(f"{name} {mode}: {row['seconds']} s, {row['evidence'][:150]}", flush=True)
            ordered = [rows[key] for key in sorted(rows)]
            keep(ordered, DATA, PAGE, render(ordered))


if __name__ == "__main__":
    typer.run(main)
