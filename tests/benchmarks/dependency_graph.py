"""Capture and inference beside the dependency graph of Torch-Pruning: processor
time in one run, one thread.

    python -m benchmarks.dependency_graph > docs/data/dependency_graph.json

Each library has a process of its own, in which the first model is done twice and its first turn is
left out, which pays for imports. Every task is done TURNS times, in turns, and its shortest time
counts, because other work on the machine can only add to it. Either side is stopped after LIMIT
seconds of processor time; such a model counts in a sum of its own, with LIMIT as the least that it
takes. Needs torchvision, timm and torch-pruning.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pathspace as ps
from benchmarks.measure import alone
from pathspace.capture.capture import capture

# seconds of processor time
LIMIT = 60.0
TURNS = 3


class TooLongError(BaseException):
    """A call took longer than LIMIT."""


def _stop(*_: object) -> None:
    raise TooLongError


def seconds(work: Callable[[], object]) -> float:
    """Processor time of a call, at most LIMIT."""
    start = time.process_time()
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        work()
    except TooLongError:
        return LIMIT
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return time.process_time() - start


def groups_of(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """All groups of Torch-Pruning's dependency graph."""
    import torch_pruning as tp

    graph = tp.DependencyGraph().build_dependency(model, example_inputs=x)
    return list(graph.get_all_groups(root_module_types=[nn.Conv2d, nn.Linear]))


MODELS = {
    "torchvision": (
        "alexnet vgg16_bn resnet18 resnet50 resnext50_32x4d densenet121 densenet169 squeezenet1_0"
        " googlenet inception_v3 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large mnasnet1_0"
        " efficientnet_b0 efficientnet_v2_s regnet_y_400mf regnet_x_800mf convnext_tiny vit_b_16"
        " swin_t vgg11 shufflenet_v2_x1_0"
    ),
    "timm": (
        "resnet18 resnet50d resnetv2_50 mobilenetv3_small_100 mobilenetv2_100 efficientnet_b0"
        " efficientnetv2_rw_t regnetx_002 regnety_008 convnext_atto vit_tiny_patch16_224"
        " deit_tiny_patch16_224 mixer_s32_224 resmlp_12_224 poolformer_s12 repvgg_a0 dla34"
        " hrnet_w18_small densenet121 ghostnet_100 tf_efficientnet_lite0 nfnet_l0 levit_128"
    ),
}


def built(library: str, name: str) -> nn.Module:
    """A classification model with random weights."""
    torch.manual_seed(0)
    if library == "timm":
        import timm

        model: nn.Module = timm.create_model(name)
    else:
        import torchvision

        model = torchvision.models.get_model(name, weights=None)
    return model.eval()


def row(library: str, name: str) -> dict[str, Any]:
    """One model, at each of the tasks."""
    x = torch.randn(1, 3, *(299, 299) if name.startswith("inception") else (224, 224))

    tasks: dict[str, Callable[[], object]] = {
        "capture_s": lambda: capture(model, (x,), {}),
        "trace_s": lambda: ps.trace(model, x),
        "torch_pruning_s": lambda: groups_of(model, x),
    }
    found: dict[str, float | None] = {}
    for turn in range(TURNS):
        for key, work in tasks.items():
            before = found.get(key, LIMIT)
            if turn and before in (None, LIMIT):
                continue
            model = built(library, name)  # (a dependency graph changes it)
            try:
                found[key] = min(before or LIMIT, seconds(work))
            except Exception as error:
                found[key] = None
                print(f"{name}: {key} fails with {type(error).__name__}", file=sys.stderr)
    print(f"{library} {name}: {found}", file=sys.stderr, flush=True)
    short = {key: value and round(value, 4) for key, value in found.items()}
    return {"library": library, "model": name, **short}


def entries(library: str, rows: list[dict[str, Any]], version: str) -> list[dict[str, str]]:
    """The sums of a library, without models on which LIMIT stopped a side, and with them."""
    own = [one for one in rows if one["library"] == library]
    both = [one for one in own if one["torch_pruning_s"] is not None]
    keys = ("trace_s", "torch_pruning_s")
    short = [one for one in both if all(one[key] < LIMIT for key in keys)]
    stopped = ", ".join(one["model"] for one in both if one not in short)
    found = []
    for chosen, least in ((short, ""), (both, "at least ")):
        if least and not stopped:
            continue
        ours, theirs = (sum(one[key] for one in chosen) for key in keys)
        longer = f", where a side is stopped after {LIMIT:.0f} s ({stopped})" if least else ""
        what = f"the {len(chosen)} of {len(own)} models of {library} that both can do{longer}"
        against = f"Torch-Pruning {version}: dependency graph with all groups"
        what = f"processor time in sum on {what}: `ps.trace`, capture included"
        row = {"against": against, "what": what, "ours": f"{ours:.1f} s"}
        found.append({**row, "theirs": f"{least}{theirs:.1f} s"})
    return found


def rows_of(library: str) -> list[dict[str, Any]]:
    """The models of one library; the first one is done twice."""
    torch.set_num_threads(1)
    names = MODELS[library].split()
    row(library, names[0])
    return [row(library, name) for name in names]


def main() -> None:
    """Measure the models, those of each library in a process of their own, and print the record."""
    import torch_pruning

    rows, sums = [], []
    for library in MODELS:
        rows += alone(rows_of, library)
        sums += entries(library, rows, torch_pruning.__version__)
    print(json.dumps({"torch": torch.__version__, "rows": rows, "head_to_head": sums}, indent=1))


if __name__ == "__main__":
    main()
