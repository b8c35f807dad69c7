"""What needs a quiet clock: steps on one thread, in the process's own time, in turns.

    PYTHONPATH=tests python -m benchmarks.one_thread [MODEL ...]

writes ``docs/data/one_thread.json`` and three tables of docs/benchmarks.md: training steps of small
networks, those in the canonical gauge, and the step alone beside what the memory allows. With
names, only these models are measured again.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.figures import keep, load, markdown, write
from benchmarks.gauge_fixed import gauge_fixed
from benchmarks.measure import in_turns, prepared, training

PROCESSES, ROUNDS = 3, 20
SHOWN = (
    "model",
    "backward_ms",
    "sgd_ms",
    "gsgd_ms",
    "compiled_ms",
    "gsgd_fused_ms",
    "gsgd/sgd",
    "compiled/sgd",
)
SHOWN += ("gsgd_fused/sgd",)


def small(name: str) -> dict[str, Any]:
    """Training steps with G-SGD over those with SGD."""
    found = training(name, "cpu", ROUNDS, 1, compiled=True)
    return {key: found[key] for key in SHOWN}


def fixed(name: str) -> dict[str, Any]:
    """Training steps with gauge-fixed AdamW over those with AdamW."""
    return gauge_fixed(name, "cpu", 6, 1)


def alone(name: str) -> dict[str, Any]:
    """Steps alone, beside the least that two passes over weights and gradients take.

    ``read_ms`` reads weights and gradients once, in one product of vectors for each tensor. What
    sums ``w g`` before it moves the weights reads them so, and then does what SGD does.
    """
    model, _, _, makers = prepared(name, "cpu", 1)
    moves: dict[str, Callable[[], Any]] = {}
    pairs = []
    for key in ("sgd", "gsgd", "gsgd_fused"):
        twin = copy.deepcopy(model)
        optimizer = makers[key](twin)
        for parameter in twin.parameters():
            parameter.grad = 1e-9 * torch.randn_like(parameter)
            if key == "sgd":
                pairs.append((parameter.detach().view(-1), parameter.grad.view(-1)))
        moves[key] = optimizer.step
    moves["read"] = lambda: [w @ g for w, g in pairs]
    # (the first turn does not count)
    in_turns(moves, 1)
    typical = in_turns(moves, 2 * ROUNDS - 1)
    sgd = typical["sgd_ms"]
    least = (typical["read_ms"] + sgd) / sgd
    ratios = {f"{key}/sgd": typical[f"{key}_ms"] / sgd for key in ("gsgd", "gsgd_fused")}
    return {"model": name, **typical, "two passes/sgd": least, **ratios}


PARTS: dict[str, tuple[Callable[[str], dict[str, Any]], tuple[str, ...], int]] = {
    "small": (small, ("small_rnn", "recurrent_cnn_96"), PROCESSES),
    "fixed": (fixed, ("resnet18", "resnet18_small", "gpt_10m"), 1),
    "alone": (alone, ("stacked_rnn",), PROCESSES),
}


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure over processes."""
    return {
        key: value if isinstance(value, str) else statistics.median(r[key] for r in rows)
        for key, value in rows[0].items()
    }


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Medians by model, with the smallest and largest last figure where
    there were several processes.
    """
    shown = []
    for some in rows.values():
        ratios = [row[list(row)[-1]] for row in some]
        cells = [
            f"{v:,.3f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v
            for v in middle(some).values()
        ]
        shown.append([*cells, f"{min(ratios):.3f} to {max(ratios):.3f}" if len(some) > 1 else "–"])
    return markdown([*next(iter(rows.values()))[0], "processes"], shown)


def main(names: list[str]) -> None:
    """Measure, keep the figures and write the tables."""
    kept = load("one_thread")
    kept |= {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "clock": "own time of the process",
        "threads": 1,
    }
    # a process of its own each time: how fast a backward pass is differs between them
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for part, (measure, models, processes) in PARTS.items():
            for name in models:
                if name in (names or models):
                    rows = [pool.apply(measure, (name,)) for _ in range(processes)]
                    kept.setdefault(part, {})[name] = rows
                    print(rows, flush=True)
                    keep("one_thread", kept)
            if kept.get(part):
                write("benchmarks.md", f"one thread, {part}", table(kept[part]))


if __name__ == "__main__":
    main(sys.argv[1:])
