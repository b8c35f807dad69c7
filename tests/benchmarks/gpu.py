"""Tests and benchmarks on a GPU in one file, and the page made of it: ``make gpu``."""

from __future__ import annotations

import copy
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import DOCS, markdown
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
    makers: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.0, foreach=True),
        "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.0, fused=True),
        "gsgd": lambda m: GSGD(m.named_parameters(), lr=0.0, skeleton=skeleton, capturable=True),
        "gsgd_fused": lambda m: GSGD(m.named_parameters(), lr=0.0, skeleton=skeleton, fused=True),
        "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.0, foreach=True, capturable=True),
        "adam_fused": lambda m: torch.optim.Adam(
            m.parameters(), lr=0.0, fused=True, capturable=True
        ),
        "gadam": lambda m: GAdam(m.named_parameters(), lr=0.0, skeleton=skeleton, capturable=True),
        "gadam_fused": lambda m: GAdam(m.named_parameters(), lr=0.0, skeleton=skeleton, fused=True),
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
# how much longer a whole training step may take than one of SGD
BOUND = 1.02
HEAD = """# On a GPU

`make gpu` tests the library on a GPU, measures steps and whole training steps there, and writes the results to
`docs/data/gpu.json`. This page is made from that file. Its optimizers are those of the version before [coordinates times any optimizer](decisions/optimizers.md), with kernels
of Triton that are gone; the steps of today have not run on a GPU.
"""  # noqa: E501
NOTHING = """
**Not measured.** No GPU was available. Without a GPU, the tests check that code that runs at
every step never waits for a number from the device.
"""


def run_tests(device: str) -> dict[str, int]:
    """How many tests passed, failed or were left out on a device."""
    files = [str(FOLDER / name) for name in (TESTS if device == "cuda" else TESTS[2:])]
    options = (
        f"-rf --tb=short -n {min(12, os.cpu_count() or 1)} -o addopts= --import-mode=importlib"
    )
    command = [sys.executable, "-m", "pytest", *files, *options.split()]
    ran = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    if ran.returncode:
        print(ran.stdout[-20000:], file=sys.stderr)
    last = ran.stdout.strip().splitlines()[-1:] or [""]
    found = {
        kind: int(number)
        for number, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last[0])
    }
    return found or {"failed": 1}


def table(head: str, rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table of Markdown; numbers have three decimals."""
    shown = [
        ["–" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v) for v in row]
        for row in rows
    ]
    return [markdown(head, shown), ""]


def noted(kept: Mapping[str, Any], part: str) -> str:
    """What has to be said of a part's figures, after a space; or nothing."""
    note = kept.get("notes", {}).get(part)
    return f" {note}" if note else ""


def ratio(times: Mapping[str, float], step: str, base: str) -> str:
    """The ratio of two times; a dash for one that was not measured."""
    return f"{times[step] / times[base]:.2f}" if step in times else "–"


def page(kept: dict[str, Any] | None) -> str:
    """The page about what was measured; it says so where nothing was.

    Args:
        kept: what :func:`main` wrote; ``None`` for nothing.
    """
    if kept is None:
        return HEAD + NOTHING
    tests = ", ".join(f"{number} {kind}" for kind, number in kept["tests"].items())
    lines = [
        f"{HEAD}\nDevice: {kept['device']}; torch {kept['torch']}, CUDA {kept['cuda']}. Tests:"
        f" {tests}.{noted(kept, 'tests')}\n"
    ]
    lines.append(
        "Medians in milliseconds; *fused* is `GSGD(..., fused=True)`. Whole training steps, in"
        f" loops in which the host does not wait for the device.{noted(kept, 'training')}\n"
    )
    rows = []
    for row in kept["training"]:
        whole = [
            row.get(f"{key}_whole_ms", row["backward_ms"] + row[f"{key}_ms"])
            for key in ("sgd", "gsgd", "gsgd_fused")
        ]
        over = [value / whole[0] for value in whole[1:]]
        verdict = "holds" if min(over) <= BOUND else "does not hold"
        rows.append([row["model"], *whole, *over, verdict])
    head = "model | SGD | G-SGD | G-SGD, fused | G-SGD over SGD | fused over SGD | at most 2 % more"
    lines += table(head, rows)
    if kept.get("steps"):
        lines.append(
            "Steps alone: *called* is the time until the step is done, *device* the device's own"
            " time (steps in a captured graph). SGD and Adam are torch's with `foreach=True`, its"
            f" fused ones stand beside them.{noted(kept, 'steps')}\n"
        )
        pairs = ("gsgd", "gsgd_fused", "sgd_fused", "gadam", "gadam_fused", "adam_fused")
        rows = []
        for row in kept["steps"]:
            called, own = row["called_ms"], row["device_ms"]
            for base, others in (("sgd", ("sgd", *pairs[:3])), ("adam", ("adam", *pairs[3:]))):
                rows += [
                    [row["model"], step, *(one.get(step) for one in (called, own)),
                     *(ratio(one, step, base) for one in (called, own))]
                    for step in others
                ]  # fmt: skip
        lines += table(
            "model | step | called | device | called, over torch | device, over torch", rows
        )
    if kept.get("fixed"):
        lines.append(
            "`GaugeFixed` around AdamW, whole training steps in loops: with torch's operations, and"
            " with kernels of both (`AdamW(..., fused=True)`, `GaugeFixed(..., fused=True)`)."
            f"{noted(kept, 'fixed')}\n"
        )
        times = [f"{key}_whole_ms" for key in ("adamw", "fixed", "adamw_fused", "fixed_fused")]
        keys = ("model", *times, "fixed/adamw", "fixed_fused/adamw_fused")
        rows = [[row[key] for key in keys] for row in kept["fixed"]]
        head = (
            "model | AdamW | gauge-fixed | AdamW, fused | gauge-fixed, fused | over AdamW | fused"
        )
        lines += table(head, rows)
    return "\n".join(lines) + "\n"


def main(
    device: Annotated[
        str, typer.Option(help="cuda; cpu tries the command out, with interpreted kernels.")
    ] = "cuda",
    json_file: Annotated[Path, typer.Option("--json")] = DOCS / "data" / "gpu.json",
    page_file: Annotated[Path, typer.Option("--page")] = DOCS / "gpu.md",
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    models: Annotated[
        list[str] | None, typer.Option("--only", help="Only this model; several times for more.")
    ] = None,
) -> None:
    """Test and measure on a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no GPU, or torch was built without CUDA; nothing was written.")
    kept = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "tests": run_tests(device),
        "training": [],
        "steps": [],
        "fixed": [],
    }
    parts: list[tuple[str, Callable[..., dict[str, Any]], Sequence[str], tuple[Any, ...]]] = [
        ("training", training, models or MODELS, (device, rounds, 1))
    ]
    if device == "cuda":
        parts += [
            ("steps", gpu_steps, ALONE, (2 * rounds,)),
            ("fixed", gauge_fixed, FIXED, (device, 2 * rounds, 1)),
        ]
    for part, function, names, args in parts:
        for name in names:
            kept[part].append(alone(function, name, *args))
            # (after each, so that a run that is cut off leaves what it has)
            json_file.write_text(json.dumps(kept, indent=1) + "\n")
    page_file.write_text(page(kept))
    print(f"figures in {json_file}, page in {page_file}")


if __name__ == "__main__":
    typer.run(main)
