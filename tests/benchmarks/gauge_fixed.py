"""AdamW in the canonical gauge beside AdamW: the step by itself, and the whole training step."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch

import pathspace as ps
from benchmarks import models
from benchmarks.measure import Clock, looped
from pathspace.training import GaugeFixed

# steps from one sweep to the next
EACH = 3


def gauge_fixed(name: str, device: str, rounds: int, threads: int) -> dict[str, Any]:
    """One model; runs in a process of its own.

    Training steps take turns, in whole rounds of :data:`EACH` (every third step ends with a
    sweep): of the steps the mean counts. On a GPU both also run with torch's fused AdamW.
    """
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model, inputs = getattr(models, name)()
    start = time.perf_counter()
    graph = ps.trace(model, *(x[:2] for x in inputs))
    traced = time.perf_counter() - start
    model, inputs = model.to(device), tuple(x.to(device) for x in inputs)
    arms: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]] = {}
    for end, fused in (("", None), ("_fused", True)) if device == "cuda" else (("", None),):
        twins = copy.deepcopy(model), copy.deepcopy(model)
        plain, inner = (torch.optim.AdamW(m.parameters(), lr=1e-4, fused=fused) for m in twins)
        start = time.perf_counter()
        fixed = GaugeFixed(inner, graph, model=twins[1])
        made = time.perf_counter() - start
        arms |= {"adamw" + end: (twins[0], plain), "fixed" + end: (twins[1], fixed)}
    clock = Clock(device, threads)
    times: dict[str, list[float]] = {key: [] for key in ("backward", *arms)}

    def backward(one: torch.nn.Module) -> None:
        one.zero_grad()
        one(*inputs).float().square().mean().backward()

    for turn in range(EACH * -(-rounds // EACH) + 1):
        for key, (one, optimizer) in arms.items():
            begun = clock()
            backward(one)
            after = clock()
            optimizer.step()
            if turn:
                times[key].append(clock() - after)
                times["backward"].append(after - begun)
    middle = statistics.median(times["backward"])
    # (a mean of few times on a GPU would count what the host does beside)
    typical = statistics.median if device == "cuda" else statistics.mean
    steps = {key: typical(times[key]) for key in arms}
    whole = {key: middle + value for key, value in steps.items()}
    if device == "cuda":
        trained = {
            key: lambda one=one, optimizer=optimizer: (backward(one), optimizer.step())
            for key, (one, optimizer) in arms.items()
        }
        whole = looped(trained, rounds // 6, EACH)
    return {
        "model": name,
        "weights": sum(p.numel() for p in model.parameters()),
        "units": graph.num_units,
        "trace_s": traced,
        "start_s": made,
        "backward_ms": 1000 * middle,
        **{f"{key}_ms": 1000 * value for key, value in steps.items()},
        **(
            {f"{key}_whole_ms": 1000 * value for key, value in whole.items()}
            if device == "cuda"
            else {}
        ),
        **{
            f"fixed{end}/adamw{end}": whole["fixed" + end] / whole["adamw" + end]
            for end in ("", "_fused")
            if "fixed" + end in whole
        },
    }
