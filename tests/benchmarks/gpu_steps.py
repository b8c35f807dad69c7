"""Steps alone on a GPU: as they are called, and the device's own time in a captured graph."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Clock, prepared
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
