"""Capture and inference beside the dependency graph of Torch-Pruning: processor time in one run, one thread.

    python -m benchmarks.dependency_graph resnet18 mobilenet_v2 > docs/data/dependency_graph.json

Each argument is a classification model of torchvision. The first model is done twice and its first turn is left out,
which pays for imports. Needs torchvision and torch-pruning.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pathspace as ps
from pathspace.capture import capture


def seconds(work: Callable[[], object]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def groups_of(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """All groups of Torch-Pruning's dependency graph."""
    import torch_pruning as tp

    graph = tp.DependencyGraph().build_dependency(model, example_inputs=x)
    return list(graph.get_all_groups(root_module_types=[nn.Conv2d, nn.Linear]))


def row(name: str) -> dict[str, Any]:
    """One model, built with random weights."""
    import torchvision

    torch.manual_seed(0)
    model, x = torchvision.models.get_model(name, weights=None).eval(), torch.randn(1, 3, 224, 224)
    try:
        theirs: float | None = seconds(lambda: groups_of(model, x))
    except Exception as error:
        theirs = None
        print(f"{name}: Torch-Pruning fails with {type(error).__name__}", file=sys.stderr)
    captured = seconds(lambda: capture(model, (x,), {}))
    ours = seconds(lambda: ps.trace(model, x))
    return {"model": name, "capture_s": captured, "trace_s": ours, "torch_pruning_s": theirs}


def main(names: list[str]) -> None:
    """Measure the models and print the record."""
    import torch_pruning

    torch.set_num_threads(1)
    row(names[0])
    rows = [row(name) for name in names]
    both = [one for one in rows if one["torch_pruning_s"] is not None]
    ours, theirs = (statistics.median(one[key] for one in both) for key in ("trace_s", "torch_pruning_s"))
    entry = {
        "against": f"Torch-Pruning {torch_pruning.__version__}: dependency graph with all groups",
        "what": f"median processor time on the {len(both)} of {len(rows)} models of torchvision that both can do: "
        "`ps.trace`, capture included",
        "ours": f"{ours:.2f} s",
        "theirs": f"{theirs:.2f} s",
    }
    print(json.dumps({"torch": torch.__version__, "rows": rows, "head_to_head": [entry]}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
