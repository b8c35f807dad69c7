"""Run all benchmarks and print their tables: ``make bench``; ``--json FILE`` keeps the figures."""

from __future__ import annotations

import json
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pathspace as ps
from benchmarks import models
from training import GSGD, GAdam, init_skeleton


def seconds(function: Callable[[], Any], runs: int) -> float:
    """Median time of a call, after one that is not counted."""
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak() -> int:
    """Peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def analysis(name: str) -> dict[str, Any]:
    """Trace, skeleton and certificate of one model, beside one forward pass; runs in a process of its own."""
    torch.manual_seed(0)
    model, inputs = getattr(models, name)()
    model.eval()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    ps.trace(torch.nn.Linear(1, 1), torch.randn(1, 1))
    with torch.no_grad():
        forward = seconds(lambda: model(*inputs), 3)
    before = peak()
    start = time.perf_counter()
    graph = ps.trace(model, *inputs)
    traced = time.perf_counter()
    graph.skeleton().basis()
    chosen = time.perf_counter()
    after_trace = peak()
    certificate = ps.verify(model, *inputs)
    return {
        "model": name,
        "weights": graph.num_weights,
        "units": graph.num_units,
        "forward_s": forward,
        "trace_s": traced - start,
        "skeleton_s": chosen - traced,
        "certificate_s": certificate.seconds,
        "holds": certificate.holds,
        "trace_over_forward": (traced - start) / forward,
        "extra_memory_trace": (after_trace - before) / weights,
        "extra_memory_all": (peak() - before) / weights,
    }


def training(name: str) -> dict[str, Any]:
    """Optimizer steps, and whole training steps over torch's optimizers on weights; same model and batch."""
    torch.manual_seed(0)
    model, inputs = getattr(models, name)()
    skeleton = ps.trace(model, *inputs).skeleton()
    init_skeleton(model, skeleton)
    optimizers = {
        "sgd": torch.optim.SGD(model.parameters(), lr=0.0, foreach=True),
        "fused": torch.optim.SGD(model.parameters(), lr=0.0, fused=True),
        "gsgd": GSGD(model.named_parameters(), lr=0.0, skeleton=skeleton),
        "adam": torch.optim.Adam(model.parameters(), lr=0.0),
        "gadam": GAdam(model.named_parameters(), lr=0.0, skeleton=skeleton),
    }
    times: dict[str, list[float]] = {key: [] for key in ("backward", *optimizers)}
    # in turn, each after a pass of its own, so that a drifting machine and full caches harm all alike
    for _ in range(60 if name == "small_rnn" else 6):
        for key, optimizer in optimizers.items():
            start = time.perf_counter()
            model.zero_grad()
            model(*inputs).square().mean().backward()
            middle = time.perf_counter()
            optimizer.step()
            times[key].append(time.perf_counter() - middle)
            times["backward"].append(middle - start)
    least = {key: min(values[1:]) for key, values in times.items()}
    held = optimizers["gsgd"].state_dict()["path_space"]
    kept = sum(v.numel() * v.element_size() for v in held.values() if isinstance(v, torch.Tensor))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    whole = {key: least["backward"] + least[key] for key in optimizers}
    return {
        "model": name,
        **{f"{key}_ms": 1000 * value for key, value in least.items()},
        "gsgd_over_sgd": whole["gsgd"] / whole["sgd"],
        "gsgd_over_fused": whole["gsgd"] / whole["fused"],
        "gadam_over_adam": whole["gadam"] / whole["adam"],
        "kept_by_unit": kept / weights,
    }


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows of equal keys as a table."""
    result = Table(title=title, title_justify="left")
    for key in rows[0]:
        result.add_column(key, justify="left" if key == "model" else "right")
    for row in rows:
        result.add_row(
            *(
                f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
                for value in row.values()
            )
        )
    return result


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep the figures in this file.")] = None,
) -> None:
    """Measure the analysis and the optimizers."""
    console = Console(width=140)
    # a fresh process for each model, so that peak memory is its own
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        jobs = [(analysis, name) for name in ("small_rnn", "residual_cnn", "stacked_rnn", "vgg16")]
        jobs += [(training, name) for name in ("small_rnn", "residual_cnn", "stacked_rnn")]
        results = [
            (function, pool.apply(function, (name,))) for function, name in track(jobs, "benchmarks", console=console)
        ]
    groups = {function.__name__: [row for f, row in results if f is function] for function in (analysis, training)}
    console.print(table("Analysis (memory in units of the model's weights)", groups["analysis"]))
    console.print(
        table("Training: least times, whole training steps over those of torch's optimizers", groups["training"])
    )
    if json_file is not None:
        about = {
            "torch": torch.__version__,
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "device": "cpu",
        }
        json_file.write_text(json.dumps({**about, **groups}, indent=2) + "\n")
        console.print(f"figures in {json_file}")


if __name__ == "__main__":
    typer.run(main)
