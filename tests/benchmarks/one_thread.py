"""What needs a quiet clock: steps on one thread, in the process's own time, in turns.

    PYTHONPATH=tests python -m benchmarks.one_thread [MODEL ...]

writes ``docs/data/one_thread.json`` and two tables of docs/benchmarks.md: training steps on path
values, and those in the canonical gauge. With
names, only these models are measured again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.figures import chosen, each, load, markdown, write
from benchmarks.measure import alone, gauge_fixed, training

ROUNDS = 20
SHOWN = "model backward_ms sgd_ms gsgd_ms adam_ms gadam_ms gsgd/sgd gadam/adam".split()


def steps(name: str) -> dict[str, Any]:
    """Training steps on path values over those of torch's optimizers."""
    found = training(name, "cpu", ROUNDS if name != "stacked_rnn" else 4, 1)
    return {key: found[key] for key in SHOWN}


def fixed(name: str) -> dict[str, Any]:
    """Training steps with gauge-fixed AdamW over those with AdamW."""
    return gauge_fixed(name, "cpu", 6, 1)


PARTS: dict[str, tuple[Callable[[str], dict[str, Any]], tuple[str, ...]]] = {
    "steps": (steps, ("small_rnn", "recurrent_cnn_96", "resnet18_small", "stacked_rnn")),
    "fixed": (fixed, ("resnet18_small", "gpt_10m")),
}


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The rows of models, one process each."""
    shown = []
    for (row,) in rows.values():
        cells = [
            f"{v:,.3f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v
            for v in row.values()
        ]
        shown.append([*cells, "–"])
    return markdown(" | ".join([*next(iter(rows.values()))[0], "processes"]), shown)


def main(names: list[str]) -> None:
    """Measure, keep the figures and write the tables."""
    kept = load("one_thread")
    kept |= {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "clock": "own time of the process",
        "threads": 1,
    }
    for part, (measure, models) in PARTS.items():
        each("one_thread", kept, part, chosen(names, models), lambda n: [alone(measure, n)])  # noqa: B023
        write("benchmarks.md", f"one thread, {part}", table(kept[part]))


if __name__ == "__main__":
    main(sys.argv[1:])
