"""What needs a quiet clock: steps on one thread, in the process's own time, in turns.

    PYTHONPATH=tests python -m benchmarks.one_thread [MODEL ...]

writes ``docs/data/one_thread.json`` and two tables of docs/benchmarks.md: training steps on path
values, and those in the canonical gauge. With
names, only these models are measured again.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.figures import keep, load, markdown, write
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


PARTS: dict[str, tuple[Callable[[str], dict[str, Any]], tuple[str, ...], int]] = {
    "steps": (steps, ("small_rnn", "recurrent_cnn_96", "resnet18_small", "stacked_rnn"), 1),
    "fixed": (fixed, ("resnet18_small", "gpt_10m"), 1),
}


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure over processes."""
    return {
        key: value if isinstance(value, str) else statistics.median(r[key] for r in rows)
        for key, value in rows[0].items()
    }


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Medians by model, with the range of the last figure over several processes."""
    shown = []
    for some in rows.values():
        ratios = [row[list(row)[-1]] for row in some]
        cells = [
            f"{v:,.3f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v
            for v in middle(some).values()
        ]
        shown.append([*cells, f"{min(ratios):.3f} to {max(ratios):.3f}" if len(some) > 1 else "–"])
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
    for part, (measure, models, processes) in PARTS.items():
        for name in models:
            if name in (names or models):
                # (how fast a backward pass is differs between processes)
                rows = [alone(measure, name) for _ in range(processes)]
                kept.setdefault(part, {})[name] = rows
                print(rows, flush=True)
                keep("one_thread", kept)
        if kept.get(part):
            write("benchmarks.md", f"one thread, {part}", table(kept[part]))


if __name__ == "__main__":
    main(sys.argv[1:])
