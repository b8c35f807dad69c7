"""What is exactly zero, or known, in the first steps of a loop need not be so later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F

import pathspace as ps
from pathspace.evidence.bench import rescaled_in_place
from pathspace.models.running import run_forward


class Net(nn.Module):
    """Layers in, between and out, and code of one's own."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor], outputs: int = 2) -> None:
        super().__init__()
        self.i, self.m, self.o = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, outputs)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def delayed(net: Any, x: Tensor) -> Tensor:
    """The oldest of three states, which are zero at the start."""
    zero = x.new_zeros(x.shape[1], 4)
    into, between = net.i, net.m

    def body(state: list[Tensor], read: Tensor) -> tuple[list[Tensor], Tensor]:
        first, second, third = state
        new = [torch.relu(into(read)), torch.relu(between(first)), second.clone()]
        return new, third.clone()

    return net.o(scan(body, [zero, zero.clone(), zero.clone()], x)[1])


def counted(net: Any, x: Tensor) -> Tensor:
    """A state that counts steps decides which layer is read."""
    into, between = net.i, net.m

    def body(count: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(into(read))
        return count + 1.0, torch.where(count < 5, h, torch.relu(between(h)))

    return net.o(scan(body, x.new_zeros(()), x)[1])


def looped(net: Any, x: Tensor) -> Tensor:
    """Values that move on by one place in every turn."""
    zero = x.new_zeros(len(x), 4)
    states = (torch.relu(net.i(x)), *(zero.clone() for _ in range(4)))

    def body(turn: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        first, second, third, fourth, _ = given
        moved = (first.clone(), torch.relu(net.m(first)), second.clone(), third.clone())
        return turn + 1, *moved, fourth.clone()

    start = torch.zeros((), dtype=torch.long)
    return net.o(while_loop(lambda turn, *_: turn < 9, body, (start, *states))[-1])


class Chained(nn.Module):
    """A recurrence in which unit k reads unit k - 1 alone, the first unit reads the inputs, and the
    last is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.o = nn.RNN(3, 6, nonlinearity="relu", bias=False), nn.Linear(1, 2)
        self.register_buffer("carried", torch.diag(torch.ones(5), -1) > 0)
        self.register_buffer("read", torch.arange(6)[:, None].expand(6, 3) < 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.rnn.weight_ih_l0 * self.read, self.rnn.weight_hh_l0 * self.carried
        state = x.new_zeros(1, x.shape[1], 6)
        y = torch._VF.rnn_relu(x, state, weights, False, 1, 0.0, False, False, False)[0]
        return self.o(y[..., -1:])


def check(model: nn.Module, x: Tensor, units: int, weights: int) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            # (a rectifier that is off could hide a wrong scale)
            weight.abs_()
    graph = ps.trace(model, x, sizes="given")
    assert (graph.num_units, graph.num_weights) == (units, weights)
    phi = torch.randn(units, dtype=torch.float64)
    before = run_forward(model, (x,), {}).outputs
    with rescaled_in_place(model, graph, phi):
        assert torch.allclose(run_forward(model, (x,), {}).outputs, before, rtol=1e-9)
    assert ps.verify(model, x).holds


@pytest.mark.slow
@pytest.mark.parametrize("code", [delayed, counted])
@pytest.mark.parametrize("length", [5, 12])
def test_scans_are_followed_until_nothing_changes(
    code: Callable[[Any, Tensor], Tensor], length: int
) -> None:
    late = code is delayed or length > 5
    weights = 16 + 10 + (20 if late else 0)
    x = torch.rand(length, 2, 3).double()
    check(Net(code).double(), x, 8 if code is delayed else 4, weights)


@pytest.mark.slow
def test_while_loops_that_read_weights_from_outside_are_refused() -> None:
    with pytest.raises(ps.CaptureError, match="not among its operands"):
        ps.trace(Net(looped).double(), torch.rand(5, 3).double())


@pytest.mark.parametrize("length", [7, 8, 12])
def test_recurrent_layers_are_followed_until_nothing_changes(length: int) -> None:
    check(Chained().double(), torch.rand(length, 2, 3).double(), 6, 3 + 5 + 2 + 2)


@pytest.mark.slow
def test_forward_runs_give_what_scans_give() -> None:
    """The state is a list: the first state, and not the first sample."""

    def code(net: Any, x: Tensor) -> Tensor:
        into, between = net.i, net.m

        def body(state: list[Tensor], read: Tensor) -> tuple[list[Tensor], Tensor]:
            h = torch.relu(into(read) + between(state[0]))
            return [h], h.clone()

        return net.o(scan(body, [x.new_zeros(x.shape[1], 4)], x)[0][0])

    model, x = Net(code).double(), torch.randn(5, 2, 3).double()
    with torch.no_grad():
        found = model(x).reshape(-1)
    torch.testing.assert_close(run_forward(model, (x,), {}).outputs, found)


class Written(nn.Module):
    """A buffer that decides what is computed, and that a call writes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)
        start: dict[str, Tensor] = {
            "counts": torch.zeros(4, dtype=torch.long),
            "flag": torch.zeros(1, dtype=torch.bool),
            "mixture": torch.eye(4),
        }
        self.kind = kind
        self.register_buffer("held", start[kind])

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), F.relu(self.b(x))
        if self.kind == "mixture":
            y = self.o((a + b) @ self.held)
            self.held.mul_(0.9).add_(0.1)
            return y
        y = self.o(torch.where(self.held > 0, a, b))
        if self.kind == "counts":
            self.held += 1
        else:
            self.held.fill_(True)
        return y


@pytest.mark.parametrize("kind", ["counts", "flag", "mixture"])
def test_buffers_that_a_call_writes_are_no_constants(kind: str) -> None:
    model, x = Written(kind).double(), torch.rand(5, 3).double()
    graph = ps.trace(model, x)
    assert not graph.unused
    before = [model(x).detach() for _ in range(2)]
    again = Written(kind).double()
    again.load_state_dict({**model.state_dict(), "held": Written(kind).double().held})
    ps.rescale_(again, graph, torch.randn(graph.num_units, dtype=torch.float64))
    for expected in before:
        assert torch.allclose(again(x), expected, rtol=1e-9)
