"""Bracket the number of units of every model here: found, and at most. Goes on where it stopped.

`python -m zoo.brackets [NAME or FAMILY ...] [--seconds 60] [--again]` from `tests/` writes the
page as well.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.figures import DOCS, markdown

from pathspace.errors import PathspaceError, first_line
from pathspace.evidence.bench import Workbench, bench_copy
from pathspace.evidence.upper_bound import upper_bound
from pathspace.models.running import cast
from pathspace.reduction import trace
from zoo.entry import Built, Entry
from zoo.entry import load as load_zoo
from zoo.packaged import available
from zoo.page import keep
from zoo.trained import TRAINED
from zoo.trained import load as load_trained

DATA, PAGE = DOCS / "data" / "brackets.json", DOCS / "brackets.md"
HEAD = """# Brackets

A bracket says how many units were found, and how many can exist at most (an
[upper bound](reduction-graph.md#an-upper-bound-on-units)). This page lists the brackets of the models of
`tests/zoo` and of [trained networks](trained.md). A bracket is *closed* if both numbers are equal: then the rules
missed no scale symmetry of rows and columns. Models that accept images of any size are measured on small images.

`python -m zoo.brackets` in `tests/` measures the models that are missing and writes this page from
[`data/brackets.json`](data/brackets.json). Times are seconds on a shared core, tracing included. Every model
of the zoo is in the table. The time for the samples of one model is limited (`--seconds`): the test is not attempted if
they would take longer.

*Exact* units hold with every epsilon unchanged; the same test bounds their number. An epsilon of 1e-12, as in
BERT, ALBERT and XLM-RoBERTa, changes derivatives by less than the test can distinguish from zero: there this bracket is
open.

"""  # noqa: E501
# why a bracket is open: name of the model -> a sentence
OPEN: dict[str, str] = {
    "hf_xlnet": (
        "features of relative positions with the lowest frequencies are equal at all positions up"
        " to 1e-7, and softmax ignores equal terms: the test counts two singular values of 8e-9 as"
        " zero"
    ),
    "hf_xlstm": (
        "the scale of a head's keys cancels in its quotient unless the quotient reaches its bound;"
        " no sample reaches it in training mode, a few reach it in evaluation mode, where the"
        " bracket is closed"
    ),
    "deeplab": (
        "the pooled branch normalises one number per image over the batch, so its bias has an"
        " effect only where a rectifier separates the images, which happens in few samples"
    ),
    "silero-vad": (
        "loud inputs saturate the gates of its LSTM; the singular values decrease without a gap, so"
        " the test cannot distinguish small derivatives from zero"
    ),
    "act_threshold_moved": (
        "its threshold is above 0: the values that pass are homogeneous, only the jump is not, "
        "and derivatives do not show jumps"
    ),
    "act_logit_scale": (
        "exp(log|h|) is |h|, whose scale is free; the rules read the operations one by one, and a "
        "logarithm fixes the scale"
    ),
    "orthogonal_mlp": (
        "the parametrisation rounds the diagonal of a parameter to whole numbers, 0 for most random"
        " weights, so only samples at its own weights reach the following layers"
    ),
    "hf_levit": (
        "in training mode its last batch norm maps the two samples of most batches to 1 and -1, so"
        " few samples give information"
    ),
    "detr": (
        "its time limit allowed fewer samples than in training mode, where the bracket is closed:"
        " some singular values are just below the threshold of 1e-8"
    ),
    "hf_levit eval": (
        "its singular values cross the threshold of 1e-8 without a gap, so the test cannot"
        " distinguish small derivatives from zero"
    ),
    "hf_glpn": (
        "its singular values cross the threshold of 1e-8 without a gap, at queries and keys of the"
        " last stages, so the test cannot distinguish small derivatives from zero"
    ),
    "crepe-tiny": (
        "its singular values cross the threshold of 1e-8 without a gap, so the test cannot"
        " distinguish small derivatives from zero"
    ),
}


def closed(row: Mapping[str, Any]) -> bool:
    """Whether nothing was missed."""
    return row["at_most"] is not None and row["at_most"] <= row["found"]


def cells(row: Mapping[str, Any]) -> list[str]:
    """One line of the table."""
    keys = ("scalars", "found", "at_most", "exact_found", "exact_at_most")
    numbers = ["" if row.get(key) is None else f"{row[key]:,}" for key in keys]
    verdict = "not attempted" if row["at_most"] is None else "closed" if closed(row) else "open"
    return [row["name"], row["mode"], *numbers, f"{row['seconds']:.1f}", verdict]


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    counts, families = [], sorted({row["family"] for row in rows})
    for family in [*families, "all"]:
        mine = [row for row in rows if family in (row["family"], "all")]
        tested = [row for row in mine if row["at_most"] is not None]
        good = sum(map(closed, tested))
        numbers = (len(mine), len(tested), good, len(tested) - good)
        counts.append([family, *map(str, numbers)])
    lines = [markdown("models | in all | tested | closed | open", counts)]
    wide = [row for row in rows if row["at_most"] is not None and not closed(row)]
    if wide:
        lines += ["", "## Open brackets", ""]
        for row in wide:
            left = [entry["tensor"] for entry in row["left_over"] or []]
            why = OPEN.get(f"{row['name']} {row['mode']}") or OPEN.get(
                row["name"], f"left over: {', '.join(left[:4])}" if left else "not explained yet"
            )
            lines.append(
                f"* {row['name']}, {row['mode']} ({row['found']:,} found, at most"
                f" {row['at_most']:,}): {why}"
            )
    skipped = [row for row in rows if row["at_most"] is None]
    if skipped:
        lines += ["", "## Not attempted", ""]
        reasons = Counter(
            (row["evidence"].removeprefix("not attempted: "), row["name"]) for row in skipped
        )
        lines += [f"* {name}: {reason}" for reason, name in sorted(reasons)]
    every = sorted(rows, key=lambda row: (row["family"], row["name"], row["mode"]))
    head = (
        "| model | mode | scalars | found | at most | exact | exact at most | seconds | bracket |"
    )
    lines += ["", "## Every model", "", head, "| --- | --- |" + " ---: |" * 6 + " --- |"]
    lines += [f"| {' | '.join(cells(row))} |" for row in every]
    return HEAD + "\n".join(lines) + "\n"


# --- measuring


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
    row: dict[str, Any] = {"name": task.name, "family": task.family, "mode": task.mode}
    row |= {"scalars": size, "found": None}
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
    seconds, most = "what the samples of one model may take", "leave larger models for another time"
    again = "again where nothing was bounded, or the bracket is open"
    parser.add_argument("--seconds", type=float, default=60.0, help=seconds)
    parser.add_argument("--scalars", type=int, default=LARGE, help=most)
    parser.add_argument("--again", action="store_true", help=again)
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
