"""Run all benchmarks and print their tables: ``make bench``; ``--json FILE`` keeps the figures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from benchmarks.figures import markdown
from benchmarks.measure import alone, analysis
from benchmarks.penalty import MODELS as PENALISED
from benchmarks.penalty import penalty

ANALYSED = ("small_rnn", "residual_cnn", "stacked_rnn", "recurrent_cnn_160", "vgg16")
PARTS = {
    "analysis": "Analysis (memory in units of the model's weights)",
    "penalty": (
        "Markov chains: whole training steps over plain ones, and what is kept for the backward"
        " pass"
    ),
}


def cell(value: Any) -> str:
    """A figure as it is shown."""
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if type(value) is int else str(value)


def in_markdown(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as a table in Markdown."""
    return markdown(" | ".join(rows[0]), [[cell(v) for v in row.values()] for row in rows])


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Keep the figures in this file.")
    ] = None,
    show: Annotated[
        Path | None, typer.Option(help="Print the tables of this file in Markdown instead.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this model; may be given several times.")
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Training steps measured (ten times as many for the small RNN)."),
    ] = 6,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of a processor.")
    ] = torch.get_num_threads(),
    device: Annotated[str, typer.Option(help="Where the training steps run: cpu or cuda.")] = "cpu",
) -> None:
    """Measure the analysis and the penal connection."""
    if show is not None:
        kept = json.loads(show.read_text())
        print("\n\n".join(in_markdown(kept[part]) for part in PARTS if kept.get(part)))
        return
    jobs: list[tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]] = [
        (analysis, (name, threads)) for name in ANALYSED if name in (only or ANALYSED)
    ]
    jobs += [
        (penalty, (name, device, 2 * rounds, threads))
        for name in PENALISED
        if name in (only or PENALISED)
    ]
    results = [(job, alone(job, *given)) for job, given in track(jobs, "benchmarks")]
    groups = {part: [row for f, row in results if f.__name__ == part] for part in PARTS}
    for part, title in PARTS.items():
        # a model chosen alone may be in one of the lists only
        if groups[part]:
            print(f"{title}\n\n{in_markdown(groups[part])}\n")
    if json_file is not None:
        about = {
            "torch": torch.__version__,
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": threads,
            "load": round(os.getloadavg()[0], 1),
            "clock": "own time of the process" if device == "cpu" and threads == 1 else "wall",
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        }
        json_file.parent.mkdir(parents=True, exist_ok=True)
        # models that were not measured now stay as they were
        old = json.loads(json_file.read_text()) if json_file.exists() else {}
        by_model = {
            part: {row["model"]: row for row in (*old.get(part, []), *rows)}
            for part, rows in groups.items()
        }
        parts = {part: list(rows.values()) for part, rows in by_model.items()}
        json_file.write_text(json.dumps({**about, **parts}, indent=1) + "\n")
        print(f"figures in {json_file}")


if __name__ == "__main__":
    typer.run(main)
