"""Hot paths never ask the device for a number: each read by the host makes it wait,
and breaks a captured graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pathspace as ps
from pathspace.diagnostics import MarkovChain, jacobian, signal, spectrum, top_singular, trace_k
from pathspace.training import GSGD, GAdam, GaugeFixed, init_skeleton_, penalise_

# (``numpy`` refuses tensors of a device, so it never waits for one)
METHODS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")
OPERATIONS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_unique2", "masked_select")


class Reads(TorchFunctionMode):
    """Counts what the host asks of tensors, by methods and inside of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = _Inside(self.found)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name == "to" and any(
            isinstance(a, str) and a == "cpu" for a in (*args[1:], *(kwargs or {}).values())
        )
        if name in METHODS or to_host:
            self.found.append(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Reads:
        super().__enter__()
        self.inside.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.inside.__exit__(*exception)
        super().__exit__(*exception)


class _Inside(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        places = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        if name in OPERATIONS or any(
            place is not None and place.dtype == torch.bool for place in places
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def residual(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), *(Block() for _ in range(blocks)), nn.Linear(6, 2))


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
Y = torch.randn(5, 2, generator=torch.Generator().manual_seed(2))


def test_the_audit_sees_every_way_to_read() -> None:
    x = torch.ones(2)
    ways = (
        lambda: x[0].item(),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: bool(x[0]),
        lambda: float(x[0]),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: x.to("cpu"),
    )
    for way in ways:
        with Reads() as reads:
            way()
        assert reads.found


MAKERS = {
    "gsgd": lambda m, g: GSGD(
        m.named_parameters(), lr=1e-3, momentum=0.9, max_multiplier=1.0, skeleton=g.skeleton()
    ),
    "gadam": lambda m, g: GAdam(
        m.named_parameters(), lr=1e-3, weight_decay=0.1, skeleton=g.skeleton()
    ),
    "gauge-fixed": lambda m, g: GaugeFixed(
        torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9), g
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_training_steps_read_nothing(name: str) -> None:
    model = residual(2)
    graph = ps.trace(model, X)
    init_skeleton_(model, graph.skeleton())
    optimizer = MAKERS[name](model, graph)
    # (torch's own AdamW counts its steps in memory of the processor)
    of_torch = {"item", "_local_scalar_dense"} if name == "gadam" else set()
    for turn in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()
        with Reads() as reads:
            optimizer.step()
        assert turn == 0 or set(reads.found) <= of_torch


def test_the_penal_connection_reads_nothing() -> None:
    model = penalise_(residual(2), X, tau=0.1)
    with Reads() as reads:
        nn.functional.mse_loss(model(X), Y).backward()
    assert reads.found == []


def test_a_watched_chain_is_read_once_a_step_and_an_observed_one_as_often_whatever_its_depth() -> (
    None
):
    counts = []
    for blocks in (2, 6):
        model = residual(blocks)
        chain = MarkovChain.trace(model, X)
        with chain.watch() as watch, Reads() as reads:
            for _ in range(2):
                nn.functional.mse_loss(model(X), Y).backward()
        assert len(watch.records) == 2
        assert len(reads.found) <= 2
        with Reads() as reads:
            chain.observe(nn.functional.mse_loss, X, Y)
        counts.append(len(reads.found))
    assert counts[0] == counts[1] <= 6


def test_signal_reads_as_often_whatever_the_probes() -> None:
    counts = []
    for probes in (2, 7):
        with Reads() as reads:
            signal(residual(1), X, probes=probes)
        counts.append(len(reads.found))
    assert counts[0] == counts[1]


MEASURES = {
    "trace": lambda operator, size: trace_k(operator, 6 * size),
    "density": lambda operator, size: spectrum(operator, probes=2 * size, steps=10 * size),
    "norm": lambda operator, size: top_singular(operator, 1 + size, tolerance=1e-1),
}


@pytest.mark.parametrize("name", MEASURES)
def test_spectra_read_as_often_whatever_the_products(name: str) -> None:
    operator = jacobian(
        nn.Sequential(nn.Linear(70, 80), nn.Tanh(), nn.Linear(80, 75)).double(),
        torch.randn(1, 70).double(),
    )
    counts = []
    for size in (1, 3):
        with Reads() as reads:
            MEASURES[name](operator, size)
        counts.append(len(reads.found))
    assert 0 < counts[0] == counts[1] <= 10
