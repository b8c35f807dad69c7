"""Tests and benchmarks on a GPU in one file, and the page made of it: ``make gpu``."""

from __future__ import annotations

import copy
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import DOCS, keep, page_of
from benchmarks.measure import Clock, alone, gauge_fixed, prepared, training
from pathspace.training import GSGD, GAdam

REPEATS = 20


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """So many steps in one graph, after a few on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            step()
    return graph


def device_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one step, by events around a replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def gpu_steps(name: str, rounds: int) -> dict[str, Any]:
    """One model's steps; runs in a process of its own."""
    model, inputs, skeleton, _ = prepared(name, "cuda", 1)
    sgd, adam = partial(torch.optim.SGD, lr=0.0), partial(torch.optim.Adam, lr=0.0, capturable=True)
    ours = {"lr": 0.0, "skeleton": skeleton}
    makers: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
        "sgd": lambda m: sgd(m.parameters(), foreach=True),
        "sgd_fused": lambda m: sgd(m.parameters(), fused=True),
        "gsgd": lambda m: GSGD(m.named_parameters(), **ours, capturable=True),
        "gsgd_fused": lambda m: GSGD(m.named_parameters(), **ours, fused=True),
        "adam": lambda m: adam(m.parameters(), foreach=True),
        "adam_fused": lambda m: adam(m.parameters(), fused=True),
        "gadam": lambda m: GAdam(m.named_parameters(), **ours, capturable=True),
        "gadam_fused": lambda m: GAdam(m.named_parameters(), **ours, fused=True),
    }
    steps, graphs = {}, {}
    for key, make in makers.items():
        twin = copy.deepcopy(model)
        twin(*inputs).square().mean().backward()
        steps[key] = make(twin).step
        graphs[key] = captured(steps[key])
    called: dict[str, list[float]] = {key: [] for key in steps}
    own: dict[str, list[float]] = {key: [] for key in steps}
    clock = Clock("cuda", 1)
    for _ in range(rounds):
        for key, step in steps.items():
            start = clock()
            step()
            called[key].append(1000 * (clock() - start))
            own[key].append(device_ms(graphs[key]))
    return {
        "model": name,
        "called_ms": {key: statistics.median(values) for key, values in called.items()},
        "device_ms": {key: statistics.median(values) for key, values in own.items()},
    }


# --- tests, benchmarks and their page


FOLDER = Path(__file__).parent.parent
TESTS = ("gpu_models.py", "gpu_optimizers.py", "training/test_optim_device.py")
# the paper's sizes: sequential digits, the stack of four layers, recurrent convolutions
MODELS = ("small_rnn", "stacked_rnn", "recurrent_cnn_96", "residual_cnn")
ALONE = ("stacked_rnn", "recurrent_cnn_96")
FIXED = ("resnet18", "resnet18_small", "gpt_10m")


def run_tests() -> dict[str, int]:
    """How many tests passed, failed or were left out on the device."""
    files = [str(FOLDER / name) for name in TESTS]
    options = f"-rf --tb=short -n {min(12, os.cpu_count() or 1)} -o addopts="
    command = [sys.executable, "-m", "pytest", *files, *options.split(), "--import-mode=importlib"]
    ran = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    if ran.returncode:
        print(ran.stdout[-20000:], file=sys.stderr)
    last = ran.stdout.strip().splitlines()[-1:] or [""]
    found = {
        kind: int(number)
        for number, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last[0])
    }
    return found or {"failed": 1}


def whole(row: dict[str, float]) -> list[float]:
    """Milliseconds of a whole training step of SGD, G-SGD, and fused G-SGD."""
    return [
        row.get(f"{key}_whole_ms", row["backward_ms"] + row[f"{key}_ms"])
        for key in ("sgd", "gsgd", "gsgd_fused")
    ]


def page(kept: dict[str, Any] | None) -> str:
    """The page about what was measured; it says so where nothing was."""
    return page_of("gpu", kept=kept, whole=whole)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    models: Annotated[
        list[str] | None, typer.Option("--only", help="Only this model; several times for more.")
    ] = None,
) -> None:
    """Test and measure on a GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU, or torch was built without CUDA; nothing was written.")
    kept = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tests": run_tests(),
    }
    parts: list[tuple[str, Callable[..., dict[str, Any]], Sequence[str], tuple[Any, ...]]] = [
        ("training", training, models or MODELS, ("cuda", rounds, 1)),
        ("steps", gpu_steps, ALONE, (2 * rounds,)),
        ("fixed", gauge_fixed, FIXED, ("cuda", 2 * rounds, 1)),
    ]
    for part, function, names, args in parts:
        kept[part] = []
        for name in names:
            kept[part].append(alone(function, name, *args))
            # (after each, so that a run that is cut off leaves what it has)
            keep("gpu", kept)
    (DOCS / "gpu.md").write_text(page(kept))


if __name__ == "__main__":
    typer.run(main)
