"""Run all benchmarks and print their tables: ``make bench``; ``--json FILE`` keeps the figures."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import chosen, markdown
from benchmarks.measure import alone, analysis
from benchmarks.penalty import MODELS as PENALISED
from benchmarks.penalty import penalty

ANALYSED = ("small_rnn", "residual_cnn", "stacked_rnn", "recurrent_cnn_160", "vgg16")
PARTS = {"analysis": (analysis, ANALYSED), "penalty": (penalty, PENALISED)}


def cell(value: Any) -> str:
    """A figure as it is shown."""
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if type(value) is int else str(value)


def in_markdown(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as a table in Markdown."""
    return markdown(" | ".join(rows[0]), [[cell(v) for v in row.values()] for row in rows])


def main(
    models: Annotated[list[str] | None, typer.Argument(help="These models alone.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Keep the figures in this file.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of a processor.")] = torch.get_num_threads(),
) -> None:
    """Measure the analysis and the penal connection."""
    about = {
        "torch": torch.__version__,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 1),
        "clock": "own time of the process" if threads == 1 else "wall",
        "device": "cpu",
    }
    # models that are not measured now stay as they were
    old = json.loads(json_file.read_text()) if json_file and json_file.exists() else {}
    parts = {}
    for part, (measured, names) in PARTS.items():
        rows = {name: alone(measured, name, threads) for name in chosen(models or [], names)}
        print("\n".join([part, "", in_markdown(list(rows.values())), ""] if rows else []))
        parts[part] = list(({row["model"]: row for row in old.get(part, [])} | rows).values())
    if json_file is not None:
        json_file.write_text(json.dumps({**about, **parts}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
