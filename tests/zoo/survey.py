"""Survey every model of the zoo: what is answered, is it sound, what pins, how long does it take.

`python -m zoo.survey [NAME or FAMILY ...] [--library timm] [--json FILE]` from `tests/`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pathspace.capture.capture import capture
from pathspace.errors import first_line
from pathspace.files.writing import replacing
from pathspace.inference.interpreter import interpret
from pathspace.inference.scales import Scales
from pathspace.inference.units import build_graph
from zoo.entry import Entry, load
from zoo.libraries import LIBRARIES
from zoo.soundness import rescaled, scaling_dimension, spread, trace_double, unbalanced

TOLERANCE = 1e-6
LARGE = 30_000_000


@dataclass
class Row:
    """What was found about one model in one mode."""

    name: str
    family: str
    mode: str
    scalars: int = 0
    weights: int = 0
    units: int = 0
    dimension: int = 0
    expected: int | None = None
    seconds_capture: float = 0.0
    seconds_inference: float = 0.0
    nodes: int = 0
    memory_mib: float = 0.0
    unused: int = 0
    pinned_parameters: list[str] = field(default_factory=list)
    pins: dict[str, int] = field(default_factory=dict)
    balance: float | None = None
    rescaling: float | None = None
    kernel: int | None = None
    error: str = ""

    @property
    def sound(self) -> bool | None:
        """Whether both measurements hold; `None` where there is nothing to measure."""
        found = [value for value in (self.balance, self.rescaling) if value is not None]
        return all(value <= TOLERANCE for value in found) if found else None


def peak() -> float:
    """Peak resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(entry: Entry, mode: str, row: Row) -> None:
    """Capture and infer in the model's own precision, on the clock."""
    model, args, kwargs = entry.make(mode)
    row.scalars = sum(parameter.numel() for parameter in model.parameters())
    start = time.perf_counter()
    captured = capture(model, args, kwargs)
    middle = time.perf_counter()
    before = peak()
    scales, _ = interpret(captured, Scales)
    graph = build_graph(captured, scales)
    row.seconds_inference = time.perf_counter() - middle
    row.seconds_capture = middle - start
    row.memory_mib = peak() - before
    row.nodes = len(captured.graph.graph.nodes)
    row.weights, row.units, row.dimension = graph.num_weights, graph.num_units, graph.dimension
    row.unused = sum(captured.parameters[name].numel() for name in graph.unused)
    row.pins = dict(Counter(f"{pin.op}: {pin.reason}" for pin in graph.pinned))
    row.pinned_parameters = sorted({name for pin in graph.pinned for name in pin.parameters})


def measured(entry: Entry, mode: str, row: Row, oracle: int) -> None:
    """Check soundness on a float64 copy with lively weights."""
    model, args, kwargs = entry.make(mode, small=True)
    graph, runner = trace_double(spread(model), args, kwargs)
    row.rescaling = rescaled(graph, runner)
    row.balance = unbalanced(graph, runner)
    if row.scalars <= oracle:
        row.kernel = scaling_dimension(runner)[0]


def survey(entry: Entry, mode: str, large: int = LARGE, oracle: int = 0) -> Row:
    """Everything about one model in one mode; exceptions become part of the row."""
    row = Row(entry.name, entry.family, mode, expected=entry.units.get(mode))
    try:
        timed(entry, mode, row)
        if row.scalars <= large:
            measured(entry, mode, row, oracle)
    except Exception as error:
        row.error = f"{type(error).__name__}: {first_line(error)}"[:300]
    return row


def table(rows: list[Row]) -> Table:
    """One line for each model and mode."""
    result = Table(title="Model zoo")
    for heading in (
        "model",
        "mode",
        "scalars",
        "in path space",
        "units",
        "capture s",
        "infer s",
        "MiB",
        "sound",
    ):
        result.add_column(heading, justify="left" if heading in ("model", "mode") else "right")
    result.add_column("pins, most frequent first", overflow="fold")
    for row in rows:
        sound = {True: "yes", False: "[red]NO[/red]", None: "-"}[row.sound]
        if row.expected is not None and row.expected != row.units:
            sound += f" [red]expected {row.expected:,}[/red]"
        if row.kernel not in (None, row.units):
            sound += f" [red]symmetries {row.kernel:,}[/red]"
        if row.sound is False:
            sound += f" [red]{row.rescaling} {row.balance}[/red]"
        share = f"{row.weights / row.scalars:.1%}" if row.scalars else "-"
        ops = Counter({k.split(":")[0].removeprefix("aten."): 0 for k in row.pins})
        for key, count in row.pins.items():
            ops[key.split(":")[0].removeprefix("aten.")] += count
        notes = ", ".join(f"{op} {count}" for op, count in ops.most_common(5))
        result.add_row(
            row.name, row.mode, f"{row.scalars:,}", share, f"{row.units:,}",
            f"{row.seconds_capture:.2f}", f"{row.seconds_inference:.2f}", f"{row.memory_mib:.0f}",
            sound, f"[red]{row.error}[/red]" if row.error else notes,
        )  # fmt: skip
    return result


def write(rows: list[Row], file: Path) -> None:
    """Keep what there is so far."""
    plain: list[dict[str, Any]] = [{**asdict(row), "sound": row.sound} for row in rows]
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(plain, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "wanted", nargs="*", help="names, families or prefixes; everything by default"
    )
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument(
        "--oracle", type=int, default=0, help="count symmetries numerically up to this many weights"
    )
    parser.add_argument("--modes", nargs="*", default=["train", "eval"])
    parser.add_argument(
        "--library", choices=sorted(LIBRARIES), help="the models of an installed library instead"
    )
    parser.add_argument(
        "--large", type=int, default=LARGE, help="measure soundness up to this many weights"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    console = Console(width=200)
    for entry in LIBRARIES[options.library]() if options.library else load().values():
        if options.wanted and not any(
            w in (entry.name, entry.family) or entry.name.startswith(w) for w in options.wanted
        ):
            continue
        for mode in entry.modes:
            if mode in options.modes:
                rows.append(survey(entry, mode, options.large, options.oracle))
                row = rows[-1]
                if options.json:
                    write(rows, options.json)
                print(
                    f"{row.name} {row.mode} {row.units} {row.sound} {row.error}",
                    file=sys.stderr,
                    flush=True,
                )
    console.print(table(rows))
    bad = [
        row
        for row in rows
        if row.error or row.sound is False or row.expected not in (None, row.units)
    ]
    console.print(f"{len(rows)} rows, {len(bad)} to look at")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
