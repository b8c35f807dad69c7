"""The signal table, gains and spectra of ResNet-50 and ViT-B/16 on a batch of eight pictures, on
the clock: ``PYTHONPATH=tests python -m benchmarks.large`` prints the table of the page on signals.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch
from zoo import load

from benchmarks.figures import markdown
from pathspace.diagnostics import jacobian, signal, spectrum, trace_k

MODELS = {"ResNet-50": "resnet50", "ViT-B/16": "vit_b_16"}


def row(title: str, name: str) -> list[str]:
    """Layers, and seconds of the table, of tr K, of the density, and of all three."""
    (model, *_), x = load()[name].make("eval"), torch.randn(8, 3, 224, 224)
    marks = [time.perf_counter()]
    table = signal(model, x)
    marks.append(time.perf_counter())
    operator = jacobian(model, x)
    trace_k(operator, 4)
    marks.append(time.perf_counter())
    spectrum(operator, probes=2, steps=2)
    marks.append(time.perf_counter())
    spent = [*(b - a for a, b in pairwise(marks)), marks[-1] - marks[0]]
    return [title, str(len(table)), *(f"{seconds:.1f} s" for seconds in spent)]


if __name__ == "__main__":
    torch.set_num_threads(2)
    rows = [row(title, name) for title, name in MODELS.items()]
    print(markdown("model | layers | table | `tr K` | density | together", rows))
