"""Models that were written to break what rules, liveness and recaptures take for granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from rescaled import change
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

import pathspace as ps
from pathspace.evidence.bench import rescaled_in_place
from pathspace.models.running import run_forward

Code = Callable[[Any, Tensor], Tensor]


def made(code: Code) -> nn.Module:
    """Two layers in, one out, two tables of positions, and code of one's own."""
    layers = {name: nn.Linear(3, 4) for name in "ab"} | {name: nn.Embedding(6, 4) for name in "fg"}
    norm = nn.LayerNorm(4, eps=1e-12)
    return network(code, **layers, o=nn.Linear(4, 2), norm=norm).double()


def dropped(net: Any, x: Tensor) -> Tensor:
    kept, _ = torch.native_dropout(torch.ones(5, 4).to(x), 0.5, True)
    torch.manual_seed(0)
    return net.o(torch.where(kept > 0, F.relu(net.a(x)), F.relu(net.b(x))))


def test_a_random_result_beside_others_is_no_constant() -> None:
    model, x = made(dropped), torch.randn(5, 3).double()
    assert not {"a.weight", "b.weight"} & set(ps.trace(model, x).unused)


def steps(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


SIZES: dict[str, tuple[Code, tuple[int, ...], tuple[int, ...]]] = {
    "tables as long as the example": (
        lambda net, x: net.o(F.relu(net.a(x)) * net.f(steps(x)) * net.g(steps(x).flip(0))),
        (2, 6, 3), (2, 4, 3),
    ),
    "a pool to the size that there is": (
        lambda net, x: net.o(
            net.norm(F.adaptive_avg_pool1d(net.f((x[..., 0] * 0).long()).transpose(1, 2), 4)
                     .transpose(1, 2) * net.g(torch.arange(4)))
        ),
        (3, 4, 3), (3, 8, 3),
    ),
    "a mean over one sample": (
        lambda net, x: net.o(net.norm(net.f((x[..., 0] > 0).long()).mean(0))),
        (1, 4, 3), (3, 8, 3),
    ),
    "a weighted sum over one sample": (
        lambda net, x: net.o(net.norm(
            torch.einsum("btd,bt->td", net.f((x[..., 0] > 0).long()), x[..., 1])
        )),
        (1, 4, 3), (3, 4, 3),
    ),
    "a product over one sample": (
        lambda net, x: net.o(net.norm((net.f((x[:, 0] > 0).long()).T @ x).T)), (1, 3), (3, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_units_hold_at_other_sizes(name: str) -> None:
    code, *shapes = SIZES[name]
    model, samples = made(code), [torch.randn(shape).double() for shape in shapes]
    # (weights without a use have a say in how many captures there are)
    for unused in {name.partition(".")[0] for name in ps.trace(model, samples[0]).unused}:
        delattr(model, unused)
    assert change(model, ps.trace(model, samples[0]), *samples) < 1e-7


REFUSED: dict[str, Code] = {
    "a write through einsum has no inverse": lambda net, x: net.o(
        torch.einsum("bi->ib", F.relu(net.a(x))).mul_(2).T
    ),
    "reads memory beyond its operand": lambda net, x: net.o(
        torch.cat([F.relu(net.a(x)), F.relu(net.b(x))])[:5].as_strided((5, 4), (8, 1))
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_graph_is_refused_in_words(words: str) -> None:
    with pytest.raises(ps.PathspaceError, match=words):
        ps.trace(made(REFUSED[words]), torch.randn(5, 3).double())


# --- what is exactly zero, or known, in the first steps of a loop need not be so later


def net_of(code: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Layers in, between and out, and code of one's own."""
    return network(code, i=nn.Linear(3, 4), m=nn.Linear(4, 4), o=nn.Linear(4, 2)).double()


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


def chained(net: Any, x: Tensor) -> Tensor:
    """Unit k reads unit k - 1 alone, the first unit reads the inputs, and the last is read."""
    carried, read = torch.diag(torch.ones(5), -1) > 0, torch.arange(6)[:, None].expand(6, 3) < 1
    weights = net.rnn.weight_ih_l0 * read, net.rnn.weight_hh_l0 * carried
    state = x.new_zeros(1, x.shape[1], 6)
    y = torch._VF.rnn_relu(x, state, weights, False, 1, 0.0, False, False, False)[0]
    return net.o(y[..., -1:])


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
    check(net_of(code), x, 8 if code is delayed else 4, weights)


@pytest.mark.parametrize("length", [7, 8, 12])
def test_recurrent_layers_are_followed_until_nothing_changes(length: int) -> None:
    rnn = nn.RNN(3, 6, nonlinearity="relu", bias=False)
    check(
        network(chained, rnn=rnn, o=nn.Linear(1, 2)).double(),
        torch.rand(length, 2, 3).double(),
        6,
        3 + 5 + 2 + 2,
    )


HELD: dict[str, Tensor] = {
    "counts": torch.zeros(4, dtype=torch.long),
    "flag": torch.zeros(1, dtype=torch.bool),
    "mixture": torch.eye(4),
}


@pytest.mark.parametrize("kind", HELD)
def test_buffers_that_a_call_writes_are_no_constants(kind: str) -> None:
    """A buffer decides what is computed."""

    def forward(net: Any, x: Tensor) -> Tensor:
        a, b, held = F.relu(net.a(x)), F.relu(net.b(x)), net.held
        y = net.o((a + b) @ held if kind == "mixture" else torch.where(held > 0, a, b))
        if kind == "mixture":
            held.mul_(0.9)
        held.fill_(True) if kind == "flag" else held.add_(1)
        return y

    model = network(forward, a=nn.Linear(3, 4), b=nn.Linear(3, 4), o=nn.Linear(4, 2))
    model.register_buffer("held", HELD[kind].clone())
    model, x = model.double(), torch.rand(5, 3).double()
    graph = ps.trace(model, x)
    assert not graph.unused
    assert change(model, graph, x, x) < 1e-9
