"""The optimizers' steps alone: operations in one, and the time of it as it is and compiled."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import in_turns, prepared


class Operations(TorchDispatchMode):
    """Counts the operations that compute or write something: on a GPU, each is a kernel
    to launch (at least one).
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = (
            func.namespace == "aten"
            and not func.is_view
            and not func.name().endswith("_unsafe_view")
        )
        self.count += bool(own)
        return func(*args, **(kwargs or {}))


def steps(name: str, device: str, rounds: int, threads: int) -> dict[str, Any]:
    """One model's steps; runs in a process of its own."""
    model, inputs, _, makers = prepared(name, device, threads)
    # neither has a compiled form of its own
    makers = {key: make for key, make in makers.items() if key not in ("fused", "gsgd_fused")}
    # a step alone is compared with the form that does the same on every device
    makers["adam"] = lambda m: torch.optim.Adam(m.parameters(), lr=0.0, foreach=True)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    figures: dict[str, Any] = {"model": name}
    moves: dict[str, Callable[[], Any]] = {}
    for key, make in makers.items():
        for kind in ("", "_compiled"):
            twin = copy.deepcopy(model)
            optimizer = make(twin)
            twin(*inputs).square().mean().backward()
            optimizer.step()
            if not kind:
                with Operations() as seen:
                    optimizer.step()
                figures[f"{key}_ops"] = seen.count
            moves[key + kind] = torch.compile(optimizer.step) if kind else optimizer.step
            # compiled once more where the first step has made the state
            for _ in range(3):
                moves[key + kind]()
    return figures | in_turns(moves, 10 * rounds, time.perf_counter, wait)
