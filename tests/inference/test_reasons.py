"""Why scales are fixed: every fixed one has a chain that ends at the root, and none is shorter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, Between, network
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.inference.interpreter import interpret
from pathspace.inference.reasons import Chains, Witness
from pathspace.inference.units import ends_of

EVERY_SECOND = torch.tensor([True, False] * 3)


def with_ones(h: Tensor) -> Tensor:
    return torch.cat([h, torch.ones_like(h[:, :1])], -1)


# operation, features it leaves, operation of the pin, elements, what its reason says
MEETINGS: dict[str, tuple[Callable[[Tensor], Tensor], int, str, int, str]] = {
    "mask under a maximum": (
        lambda h: F.relu(h).masked_fill(EVERY_SECOND, -1e9).amax(-1, keepdim=True), 1, "aten.amax",
        3, "-1e+09"),
    "column of ones": (lambda h: with_ones(h).cumsum(-1), 7, "aten.cumsum", 6, "constant tensor"),
    "choice": (lambda h: torch.where(h > 0, h, 0.3), 6, "aten.where", 6, "0.3"),
    "a sum with a column of ones": (
        lambda h: with_ones(h).sum(-1, keepdim=True), 1, "aten.sum", 6, "constant tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEETINGS)
def test_constants_that_fix_a_scale_are_on_record(name: str) -> None:
    operation, features, op, elements, said = MEETINGS[name]
    graph = ps.trace(Between(operation, features), torch.randn(3, 4))
    (pin,) = graph.pinned
    assert (pin.op, pin.elements) == (op, elements)
    assert said in pin.reason and "inference/test_reasons.py" in pin.source
    first = next(reason for reason in graph.reasons() if reason.parameter == "first.weight")
    assert first.scales == elements and first.chain[-1].op == op and said in first.chain[-1].reason


def test_inputs_are_no_constants() -> None:
    graph = ps.trace(Between(lambda h: h, 6), torch.randn(3, 4))
    assert not graph.pinned

    skip = network(
        lambda net, x: net.outer(x + net.inner(x)), inner=nn.Linear(4, 4), outer=nn.Linear(4, 2)
    )
    graph = ps.trace(skip, torch.randn(3, 4))
    assert not graph.pinned
    (inner,) = (reason for reason in graph.reasons() if reason.parameter == "inner.weight")
    assert [step.op for step in inner.chain] == ["aten.add"] and "input" in inner.chain[0].reason


def oracle(witness: Witness) -> dict[int, int]:
    """Distances to the root over plain equations, one scalar at a time."""
    near: dict[int, set[int]] = {0: {0}}
    for left, right, _ in witness.noted.pairs:
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            for one, two in ((a, b), (b, a), (-a, -b), (-b, -a)):
                near.setdefault(one, set()).add(two)
    distance, pending = {0: 0}, deque([0])
    while pending:
        here = pending.popleft()
        for other in near.get(here, ()):
            if other not in distance:
                distance[other] = distance[here] + 1
                pending.append(other)
    return distance


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_every_fixed_scale_has_a_shortest_chain(name: str) -> None:
    model, args = CASES[name]()
    graph = ps.trace(model, *args)
    witness, _ = interpret(graph.captured, Witness)
    ends_of(witness)
    chains, distance = Chains(witness), oracle(witness)
    for number in range(1, witness.equations.size):
        if number in distance and not witness.noted.rows:
            current, length = number, 0
            while current:
                current, length = int(chains.before(np.array([current]))[0]), length + 1
            assert length == distance[number]
    for reason in graph.reasons():
        assert reason.chain and reason.scales > 0
        assert all(step.reason for step in reason.chain)
    # what is free has no reason, what is fixed has one
    listed = {reason.parameter for reason in graph.reasons() if reason.side == "out"}
    for block in graph.blocks:
        if len(block.shape) > 1 and bool((block.head != 0).all()):
            assert block.name not in listed


def test_models_with_gathered_tables_are_explained() -> None:
    """Scales of rows that data picks are tried on a copy of the equations, without reasons."""
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    found = ps.explain(model, torch.tensor([[1, 2, 6]])).reasons
    assert {reason.parameter for reason in found} >= {"1.weight", "3.weight"}
    assert all(reason.chain for reason in found)


def test_shared_running_statistics_are_a_reason() -> None:
    """One norm after two layers, one of which a sigmoid fixes."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.b(x)
        rest = net.norm(h) + torch.sigmoid(h)
        return net.out(net.norm(net.a(x)).relu()) + rest.sum(1, keepdim=True)

    a, b, norm = nn.Linear(3, 4), nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)
    model = network(forward, a=a, b=b, norm=norm, out=nn.Linear(4, 2))
    found = ps.explain(model.eval(), torch.randn(5, 3)).reasons
    (chain,) = (reason.chain for reason in found if reason.parameter == "a.weight")
    assert [step.op for step in chain] == ["aten.batch_norm", "aten.sigmoid"]
