"""One function has one chain, however it is written, and what only mixes a stream is not a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn
from torch.nn import functional as F

from pathspace.diagnostics import MarkovChain
from pathspace.errors import UnsupportedError
from pathspace.training import penalise_


def written(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    """A block whose forward is a function of the module and its input."""
    f, g, h = (nn.Linear(4, 4) for _ in range(3))
    return network(forward, f=f, g=g, h=h, share=nn.Parameter(torch.rand(4)))


def block(m: Any, x: Tensor) -> Tensor:
    return m.g(torch.relu(m.f(x)))


def gate(m: Any) -> Tensor:
    return m.share.sigmoid()


BETWEEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "difference": lambda m, x: x + gate(m) * (block(m, x) - x),
    "function": lambda m, x: torch.lerp(x, block(m, x), gate(m)),
    "shares": lambda m, x: (1 - gate(m)) * x + gate(m) * block(m, x),
    "taken away": lambda m, x: x - gate(m) * (x - block(m, x)),
}


@pytest.mark.parametrize("how", BETWEEN)
def test_a_step_between_stream_and_branch_is_a_node_in_every_spelling(how: str) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    first, second = (
        nn.Sequential(*(written(BETWEEN[name]) for _ in range(3))) for name in ("difference", how)
    )
    second.load_state_dict(first.state_dict())
    assert torch.allclose(first(x), second(x), atol=1e-6)
    chains = [MarkovChain.trace(model, x) for model in (first, second)]
    assert [len(chain) for chain in chains] == [3, 3]
    if how == "function":
        records = [chain.observe(F.mse_loss, x, y) for chain in chains]
        assert torch.allclose(records[0].cosines, records[1].cosines, atol=1e-5)
        assert torch.allclose(records[0].norms, records[1].norms, atol=1e-5)


def test_the_penalty_of_an_interpolation_is_that_of_its_direction() -> None:
    x, tau = torch.randn(8, 4), 0.1
    model = nn.Sequential(*(written(BETWEEN["function"]) for _ in range(2)))
    value, penalty, total = x, torch.zeros(()), torch.zeros(())
    for layer in model:
        direction = gate(layer) * (block(layer, value) - value)
        penalty, value = penalty + direction.square().sum(), value + direction
    total = value.square().sum() + tau / 2 * penalty
    wanted = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    penalise_(model, x, tau=tau)
    model(x).square().sum().backward()
    for p, slope in zip(model.parameters(), wanted, strict=True):
        assert (p.grad is None) == (slope is None)
        assert slope is None or torch.allclose(p.grad, slope, atol=1e-4)


def moved(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1))


SHIFTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "padded": lambda m, x: x + (moved(x) - x) * m.share,
    "rolled": lambda m, x: x + (x.roll(1, 1) - x) * m.share,
    "lerp": lambda m, x: torch.lerp(x, moved(x), m.share),
    "shares": lambda m, x: x * m.share + moved(x) * (1 - m.share),
    "gain": lambda m, x: x + m.share * x,
}


@pytest.mark.parametrize("how", SHIFTS)
def test_a_stream_mixed_with_its_own_copy_is_not_a_node(how: str) -> None:
    mixed = nn.Sequential(
        *(written(lambda m, x: x + block(m, SHIFTS[how](m, x))) for _ in range(2))
    )
    assert len(MarkovChain.trace(mixed, torch.randn(2, 5, 4))) == 2
    assert len(MarkovChain.trace(written(SHIFTS[how]), torch.randn(2, 5, 4))) == 0


def dropped_last(m: Any, x: Tensor) -> Tensor:
    y = 0 * x
    for _ in range(3):
        h = torch.relu(m.f(x))
        y, x = y + m.g(h), x - m.h(h)
    return y


def test_additions_that_no_output_needs_are_left_out() -> None:
    x, model = torch.randn(4, 4), written(dropped_last)
    chain = MarkovChain.trace(model, x)
    assert len(chain) == 5
    record = chain.observe(F.mse_loss, x, torch.randn(4, 4))
    assert bool(record.cosines.isfinite().any(1).all())
    assert all(p.grad is None for p in model.parameters()) and not x.requires_grad


def test_a_model_that_adds_more_when_it_runs_is_refused_in_both_ways() -> None:
    used = written(lambda m, x: x + m.f(x) + (m.g(x) if type(x) is Tensor else 0))
    with pytest.raises(UnsupportedError, match="2 additions"):
        MarkovChain.trace(used, torch.ones(2, 4))


def attends(m: Any, x: Tensor, rows: Any) -> Tensor:
    y = F.layer_norm(x, (4,))
    scores = m.f(y[:, rows]) @ m.g(y).transpose(1, 2)
    return m.h(scores.softmax(-1) @ y)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(-1, None)])
def test_one_position_that_asks_all_others_is_a_stream(rows: slice) -> None:
    one = written(lambda m, x: (x[:, rows] + attends(m, x, rows))[:, 0])
    assert [node.kind for node in MarkovChain.trace(one, torch.randn(2, 5, 4)).nodes] == [
        "identity"
    ]
    # a position that others alone speak to is an input
    other = written(lambda m, x: (x[:, rows] + attends(m, x, slice(1, 2)))[:, 0])
    assert len(MarkovChain.trace(other, torch.randn(2, 5, 4))) == 0
