"""The signal table, gains and spectra of ResNet-50 and ViT-B/16 on a batch of
eight pictures, on the clock.

``PYTHONPATH=tests python -m benchmarks.large``; ``--torchvision`` takes that library's
models instead of the replicas.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Annotated, Any

import torch
import typer
from zoo import load

from benchmarks.figures import markdown
from pathspace.diagnostics import jacobian, signal, spectrum, trace_k

MODELS = ("resnet50", "vit_b_16")


def build(name: str, torchvision: bool) -> torch.nn.Module:
    """The model in evaluation mode, random weights."""
    torch.manual_seed(0)
    if torchvision:
        from torchvision.models import get_model

        return get_model(name, weights=None).eval()
    return load()[name].make("eval")[0]


def main(
    threads: Annotated[int, typer.Option(min=1)] = 2,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    torchvision: Annotated[
        bool, typer.Option(help="Its own models, where it is installed.")
    ] = False,
) -> None:
    """Measure, and print a table in Markdown."""
    torch.set_num_threads(threads)
    head = "model | layers | signal_s | trace_k_s | spectrum_s | all_s | cpu_s | tr K"
    rows = []
    for name in MODELS:
        model, x = build(name, torchvision), torch.randn(batch, 3, 224, 224)
        own = time.process_time()
        marks = [time.perf_counter()]
        found: list[Any] = []
        table = signal(model, x)
        marks.append(time.perf_counter())
        operator = jacobian(model, x)
        for measure in (
            lambda: trace_k(operator, 4),  # noqa: B023
            lambda: spectrum(operator, probes=2, steps=2),  # noqa: B023
        ):
            found.append(measure())
            marks.append(time.perf_counter())
        spent = [b - a for a, b in itertools.pairwise(marks)]
        spent += [marks[-1] - marks[0], time.process_time() - own]
        trace, density = found
        cells = [name, str(len(table)), *(f"{s:.1f}" for s in spent)]
        cells += [f"{trace.value:.3g} ± {trace.error:.1g}", f"> {density.largest:.4g}"]
        rows.append([*cells, f"{os.getloadavg()[0]:.1f}"])
    print(markdown(f"{head} | largest sigma | load", rows))


if __name__ == "__main__":
    typer.run(main)
