"""What benchmarks measure, and in which way; spawned processes can import this module."""

from __future__ import annotations

import copy
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import pathspace as ps
from benchmarks import models
from pathspace.capture.capture import capture
from pathspace.training import GSGD, GAdam, GaugeFixed, init_skeleton_

# (a step with a rate of 0 is computed in another way, which takes longer)
RATE = 1e-6
Maker = Callable[[torch.nn.Module], torch.optim.Optimizer]


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
    """Peak memory of this process so far, in bytes (`getrusage` counts that of its parent, too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def alone(function: Callable[..., Any], *given: Any) -> Any:
    """The result of a call in a fresh process: peak memory and caches are its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


@contextmanager
def stem_runs() -> Iterator[list[nn.Module]]:
    """A context that lists each run of a convolution of three channels, which is the stem of a
    network of images: one for each forward pass.
    """
    runs: list[nn.Module] = []

    def listed(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.Conv2d) and module.in_channels == 3:
            runs.append(module)

    handle = register_module_forward_pre_hook(listed)
    try:
        yield runs
    finally:
        handle.remove()


class Clock:
    """Seconds. One thread's own time does not grow with what else a shared processor is doing; on a
    GPU, all that was asked for is waited for.
    """

    def __init__(self, device: str, threads: int) -> None:
        own = device == "cpu" and threads == 1
        self.now = time.process_time if own else time.perf_counter
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def __call__(self) -> float:
        self.wait()
        return self.now()


Arms = dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]]
Inputs = tuple[torch.Tensor, ...]


def backward(model: torch.nn.Module, inputs: Inputs) -> None:
    model.zero_grad()
    model(*inputs).float().square().mean().backward()


def in_turns(
    arms: Arms, inputs: Inputs, clock: Clock, rounds: int, together: int = 1
) -> dict[str, list[float]]:
    """Seconds of all backward passes, and of each optimizer's steps. They take turns, so that a
    drifting machine harms all alike, with so many in a row; the first round is not counted.
    """
    times: dict[str, list[float]] = {key: [] for key in ("backward", *arms)}
    for turn in range(rounds + 1):
        for key, (model, optimizer) in arms.items():
            for _ in range(together):
                start = clock()
                backward(model, inputs)
                middle = clock()
                optimizer.step()
                if turn:
                    times[key].append(clock() - middle)
                    times["backward"].append(middle - start)
    return times


def looped(
    arms: Arms, inputs: Inputs, clock: Clock, rounds: int, together: int
) -> dict[str, float]:
    """Seconds of whole training steps, so many in a row as in training, where the host does not
    wait for the device; medians over rounds, in turns.
    """
    found: dict[str, list[float]] = {key: [] for key in arms}
    for _ in range(rounds):
        for key, (model, optimizer) in arms.items():
            start = clock()
            for _ in range(together):
                backward(model, inputs)
                optimizer.step()
            found[key].append((clock() - start) / together)
    return {key: statistics.median(values) for key, values in found.items()}


def analysis(name: str, threads: int) -> dict[str, Any]:
    """Trace, skeleton and certificate of one model, beside one forward pass."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model, inputs = getattr(models, name)()
    model.eval()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    ps.trace(torch.nn.Linear(1, 1), torch.randn(1, 1))
    with torch.no_grad():
        forward = seconds(lambda: model(*inputs), 3)
    before = peak()
    start = time.perf_counter()
    capture(model, inputs)
    captured = time.perf_counter() - start
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
        "capture_s": captured,
        # the same capture again, and what follows it
        "trace_s": traced - start,
        "skeleton_s": chosen - traced,
        "certificate_s": certificate.seconds,
        "holds": certificate.holds,
        "trace_over_forward": (traced - start) / forward,
        "extra_memory_trace": (after_trace - before) / weights,
        "extra_memory_all": (peak() - before) / weights,
    }


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in containers, and in what optimizers are made of."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)
    elif type(value).__module__.startswith("pathspace.training.optim."):
        yield from tensors({key: item for key, item in vars(value).items() if key != "skeleton"})


def held(optimizer: torch.optim.Optimizer, skeleton: ps.Skeleton) -> int:
    """Bytes an optimizer holds beside weights, gradients, torch's state and the skeleton."""
    ids = [ids for block in skeleton.graph.blocks for ids in (block.tail, block.head)]
    given = {
        t.untyped_storage().data_ptr()
        for t in [p for g in optimizer.param_groups for p in g["params"]] + ids
    }
    kept = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("param_groups", "state", "skeleton")
    }
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(kept)}
    return sum(size for pointer, size in storages.items() if pointer not in given)


def prepared(
    name: str, device: str, threads: int
) -> tuple[torch.nn.Module, Inputs, ps.Skeleton, dict[str, Maker]]:
    """A model with a unit skeleton, its inputs, the skeleton, and the optimizers compared."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model, inputs = getattr(models, name)()
    skeleton = ps.trace(model, *inputs).skeleton()
    init_skeleton_(model, skeleton)
    makers: dict[str, Maker] = {
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=RATE, foreach=True),
        "gsgd": lambda m: GSGD(m.named_parameters(), lr=RATE, skeleton=skeleton),
        "adam": lambda m: torch.optim.Adam(m.parameters(), lr=RATE),
        "gadam": lambda m: GAdam(m.named_parameters(), lr=RATE, skeleton=skeleton),
        "gsgd_fused": lambda m: GSGD(m.named_parameters(), lr=RATE, skeleton=skeleton, fused=True),
    }
    return model.to(device), tuple(x.to(device) for x in inputs), skeleton, makers


def training(name: str, device: str, rounds: int, threads: int) -> dict[str, Any]:
    """Steps of optimizers, and whole training steps over torch's; same weights and batch."""
    model, inputs, _, makers = prepared(name, device, threads)
    arms: Arms = {}
    for key, make in makers.items():
        # weights of their own: G-SGD would look after weights that another optimizer has written to
        twin = copy.deepcopy(model)
        arms[key] = twin, make(twin)
    clock = Clock(device, threads)
    # where little is computed, some steps in a row, as in training, because what another optimizer
    # leaves in the caches would cost more than the step
    times = in_turns(arms, inputs, clock, rounds, 10 if name == "small_rnn" else 1)
    typical = {key: statistics.median(values) for key, values in times.items()}
    whole = {key: typical["backward"] + typical[key] for key in arms}
    if device == "cuda":
        whole = looped(arms, inputs, clock, rounds, 10)
        typical |= {f"{key}_whole": value for key, value in whole.items()}
    return {
        "model": name,
        **{f"{key}_ms": 1000 * value for key, value in typical.items()},
        "gsgd/sgd": whole["gsgd"] / whole["sgd"],
        "gadam/adam": whole["gadam"] / whole["adam"],
    }


# --- AdamW in the canonical gauge beside AdamW


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
    arms: Arms = {}
    ends = {"": None, "_fused": True} if device == "cuda" else {"": None}
    for end, fused in ends.items():
        twins = copy.deepcopy(model), copy.deepcopy(model)
        plain, inner = (torch.optim.AdamW(m.parameters(), lr=1e-4, fused=fused) for m in twins)
        start = time.perf_counter()
        fixed = GaugeFixed(inner, graph, model=twins[1])
        made = time.perf_counter() - start
        arms |= {"adamw" + end: (twins[0], plain), "fixed" + end: (twins[1], fixed)}
    clock = Clock(device, threads)
    times = in_turns(arms, inputs, clock, EACH * -(-rounds // EACH))
    middle = statistics.median(times["backward"])
    # (a mean of few times on a GPU would count what the host does beside)
    typical = statistics.median if device == "cuda" else statistics.mean
    steps = {key: typical(times[key]) for key in arms}
    whole, shown = {key: middle + value for key, value in steps.items()}, {}
    if device == "cuda":
        whole = looped(arms, inputs, clock, rounds // 6, EACH)
        shown = {f"{key}_whole_ms": 1000 * value for key, value in whole.items()}
    return {
        "model": name,
        "weights": sum(p.numel() for p in model.parameters()),
        "units": graph.num_units,
        "trace_s": traced,
        "start_s": made,
        "backward_ms": 1000 * middle,
        **{f"{key}_ms": 1000 * value for key, value in steps.items()},
        **shown,
        **{f"fixed{end}/adamw{end}": whole[f"fixed{end}"] / whole[f"adamw{end}"] for end in ends},
    }
