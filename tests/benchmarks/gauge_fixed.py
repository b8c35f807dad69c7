"""AdamW in the canonical gauge beside AdamW: the step by itself, and the whole training step."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch

import pathspace as ps
from benchmarks import models
from pathspace.training import GaugeFixed


def gauge_fixed(name: str, device: str, rounds: int, threads: int) -> dict[str, Any]:
    """One model; runs in a process of its own.

    Training steps of both take turns, until every set of units was treated as often as the
    others (a sweep treats one of them): of the steps the mean counts, since some sets hold
    more weights than others.
    """
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model, inputs = getattr(models, name)()
    start = time.perf_counter()
    graph = ps.trace(model, *(x[:2] for x in inputs))
    model, inputs = model.to(device), tuple(x.to(device) for x in inputs)
    twin = copy.deepcopy(model)
    traced = time.perf_counter()
    fixed = GaugeFixed(torch.optim.AdamW(model.parameters(), lr=1e-4), graph)
    made = time.perf_counter()
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-4)
    clock = time.process_time if device == "cpu" and threads == 1 else time.perf_counter
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {"backward": [], "adamw": [], "fixed": []}
    turns = len(fixed.sets) * -(-rounds // len(fixed.sets))
    for turn in range(turns + 1):
        for key, one, optimizer in (("adamw", twin, plain), ("fixed", model, fixed)):
            one.zero_grad()
            wait()
            begun = clock()
            one(*inputs).float().square().mean().backward()
            wait()
            after = clock()
            optimizer.step()
            wait()
            if turn:
                times["backward"].append(after - begun)
                times[key].append(clock() - after)
    middle = statistics.median(times["backward"])
    adamw, gauge = statistics.mean(times["adamw"]), statistics.mean(times["fixed"])
    return {
        "model": name,
        "weights": sum(p.numel() for p in model.parameters()),
        "units": graph.num_units,
        "sets": len(fixed.sets),
        "trace_s": traced - start,
        "start_s": made - traced,
        "backward_ms": 1000 * middle,
        "adamw_ms": 1000 * adamw,
        "fixed_ms": 1000 * gauge,
        "fixed/adamw": (middle + gauge) / (middle + adamw),
    }
