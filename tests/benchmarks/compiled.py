"""Steps through ``torch.compile``: how long the compiler takes, and the steps
beside those as they are.

    PYTHONPATH=tests python -m benchmarks.compiled

writes ``docs/data/compiled.json`` and the table of docs/benchmarks.md. One
thread; its own time, in turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zoo import vision

import pathspace as ps
from benchmarks.figures import keep, markdown, write
from benchmarks.measure import in_turns
from benchmarks.models import small_rnn
from pathspace.training import GSGD, GaugeFixed, init_skeleton_

ROUNDS = 40
SUBJECTS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet50": lambda: (vision.resnet("bottleneck", (3, 4, 6, 3)), torch.randn(2, 3, 64, 64)),
    "small_rnn": lambda: (small_rnn()[0], small_rnn()[1][0]),
}
KINDS = ("G-SGD", "gauge-fixed AdamW")


def made(kind: str, model: nn.Module, x: torch.Tensor) -> torch.optim.Optimizer:
    """An optimizer whose steps are too small to be seen."""
    graph = ps.trace(model, x)
    if kind != "G-SGD":
        return GaugeFixed(torch.optim.AdamW(model.parameters(), lr=1e-9), graph)
    skeleton = graph.skeleton()
    init_skeleton_(model, skeleton)
    return GSGD(model.named_parameters(), lr=1e-9, skeleton=skeleton)


def measure(name: str, kind: str) -> dict[str, Any]:
    """Seconds until three compiled steps are taken, and the medians of steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = SUBJECTS[name]()
    optimizer = made(kind, model, x)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    optimizer.step()
    compiled = torch.compile(optimizer.step)
    begun = time.perf_counter()
    for _ in range(3):
        compiled()
    waited = time.perf_counter() - begun
    # every set of units is swept by steps of both kinds: an odd number of steps in each round
    moves = {"step": optimizer.step, "compiled": compiled, "again": optimizer.step}
    found = in_turns(moves, ROUNDS)
    return {
        "model": name,
        "tensors": len(list(model.parameters())),
        "optimizer": kind,
        "compiler_s": waited,
        **found,
        "compiled/step": 2 * found["compiled_ms"] / (found["step_ms"] + found["again_ms"]),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure, keep the figures and write the table."""
    torch.set_num_threads(1)
    rows = []
    for name in SUBJECTS:
        for kind in KINDS:
            rows.append(measure(name, kind))
            print(rows[-1], flush=True)
            keep("compiled", {"torch": torch.__version__, "rounds": ROUNDS, "rows": rows})
    shown = [
        [f"{v:,.3f}" if isinstance(v, float) and k != "load" else f"{v}" for k, v in row.items()]
        for row in rows
    ]
    write("benchmarks.md", "compiled", markdown(list(rows[0]), shown))


if __name__ == "__main__":
    main()
