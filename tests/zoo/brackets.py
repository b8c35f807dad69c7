"""Bracket the number of units of every model here: found, and at most. Goes on where it stopped.

`python -m zoo.brackets [NAME or FAMILY ...] [--seconds 60] [--again]` from `tests/`; the
page is `zoo.brackets_page`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pathspace.errors import PathspaceError, first_line
from pathspace.evidence.bench import Workbench, bench_copy
from pathspace.evidence.upper_bound import upper_bound
from pathspace.models.running import cast
from pathspace.reduction import trace
from zoo.brackets_page import DATA, PAGE, render
from zoo.entry import Built, Entry
from zoo.entry import load as load_zoo
from zoo.packaged import available
from zoo.rows import keep
from zoo.trained import TRAINED
from zoo.trained import load as load_trained

# beyond that many scalars the samples alone would take too long
LARGE = 20_000_000
SURVEY = DATA.with_name("survey.json")
KEPT = ("at_most", "exact_found", "exact_at_most", "seconds", "evidence", "left_over")


@dataclass(frozen=True)
class Task:
    """A model of the zoo, or a trained network, in one mode."""

    name: str
    family: str
    mode: str
    entry: Entry | None

    def make(self) -> Built:
        """The model and its inputs, small ones where it takes any size."""
        return (
            load_trained(self.name)
            if self.entry is None
            else self.entry.make(self.mode, small=True)
        )

    @property
    def key(self) -> str:
        """Name and mode."""
        return f"{self.name} {self.mode}"


def tasks() -> Iterator[Task]:
    """Everything that can be built here."""
    for entry in load_zoo().values():
        for mode in entry.modes:
            yield Task(entry.name, entry.family, mode, entry)
    for name, network in TRAINED.items():
        if available(*network.packages):
            yield Task(name, "trained", "eval", None)


def scalars(task: Task) -> int:
    """How many weights a model has that the survey does not know."""
    try:
        return sum(parameter.numel() for parameter in task.make()[0].parameters())
    except Exception:
        return 0


def bracket(task: Task, seconds: float, size: int) -> dict[str, Any]:
    """Found and at most, or why not."""
    row: dict[str, Any] = {
        "name": task.name,
        "family": task.family,
        "mode": task.mode,
        "scalars": size,
        "found": None,
    }
    if size > LARGE:
        reason = f"not attempted: {size:,} scalars, more than {LARGE:,}"
        return {**row, **dict.fromkeys(KEPT), "evidence": reason, "seconds": 0.0}
    start = time.perf_counter()
    try:
        model, args, kwargs = task.make()
        graph = trace(model, *args, kwargs=kwargs, sizes="given")
        row["found"] = graph.num_units
        copy, dtype = bench_copy(model, graph, (args, kwargs))
        bench = Workbench(graph, copy, cast((args, kwargs), dtype))
        bound = upper_bound(bench, most_seconds=seconds).to_dict()
    except PathspaceError as error:
        bound = {"evidence": f"not attempted: {first_line(error).split(' (at ')[0]}"[:300]}
    except Exception as error:
        bound = {"evidence": f"fault: {type(error).__name__}: {first_line(error)}"[:300]}
    bound["seconds"] = round(time.perf_counter() - start, 1)
    return {**row, **{name: bound.get(name) for name in KEPT}}


def write(rows: dict[str, dict[str, Any]]) -> None:
    """Data and page."""
    ordered = [rows[key] for key in sorted(rows)]
    keep(ordered, DATA, PAGE, render(ordered))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wanted", nargs="*", help="names or families; everything by default")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="what the samples of one model may take"
    )
    parser.add_argument(
        "--scalars", type=int, default=LARGE, help="leave larger models for another time"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="again where nothing was bounded, or the bracket is open",
    )
    options = parser.parse_args()
    known = json.loads(Path(DATA).read_text()) if DATA.exists() else []
    rows = {f"{row['name']} {row['mode']}": row for row in known}
    # the smallest first
    sizes = {(row["name"], row["mode"]): row["scalars"] for row in json.loads(SURVEY.read_text())}
    wanted: list[tuple[int, Task]] = []
    for task in tasks():
        if options.wanted and not {task.name, task.family} & set(options.wanted):
            continue
        done = rows.get(task.key)
        if done is None or (
            options.again and (done["at_most"] is None or done["at_most"] != done["found"])
        ):
            known_size = done["scalars"] if done else sizes.get((task.name, task.mode))
            wanted.append((scalars(task) if known_size is None else known_size, task))
    for size, task in sorted(wanted, key=lambda pair: pair[0]):
        if options.scalars < size <= LARGE:
            continue
        torch.manual_seed(0)
        row = rows[task.key] = bracket(task, options.seconds, size)
        write(rows)
        print(
            f"{task.key}: {row['seconds']} s, {row['evidence'][:150]}", file=sys.stderr, flush=True
        )


if __name__ == "__main__":
    main()
