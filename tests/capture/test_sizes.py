"""Statements hold for inputs of other sizes than the traced ones, where the model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from rescaled import change
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps


def net_of(way: Callable[[Any, Tensor], Tensor], **parts: Any) -> nn.Module:
    """Parameters and modules by name, and a function of them."""
    held = {
        name: nn.Parameter(part) if isinstance(part, Tensor) else part
        for name, part in parts.items()
    }
    return network(way, **held)


def lin(n: int, m: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(n, m, bias=bias)


def between(way: Callable[[Any, Tensor], Tensor], **parts: Any) -> nn.Module:
    """A function between two layers."""
    return net_of(way, a=lin(4, 3), b=lin(3, 2), **parts)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape)


def stepwise(way: Callable[[Any, Tensor], Tensor], bias: bool = True, **parts: Any) -> nn.Module:
    """A loop of one's own."""
    enter, stay, leave = lin(4, 3, bias), lin(3, 3, bias), lin(3, 2, bias)
    return net_of(way, enter=enter, stay=stay, leave=leave, **parts)


def loop(net: Any, x: Tensor) -> Tensor:
    h: Any = None
    for t in range(x.shape[1]):
        h = F.relu(net.enter(x[:, t])) if h is None else F.relu(net.enter(x[:, t]) + net.stay(h))
    return net.leave(h)


def repeated(net: Any, x: Tensor) -> Tensor:
    h = F.relu(net.enter(x.mean(1)))
    for _ in range(x.shape[1]):
        h = F.relu(net.stay(h))
    return net.leave(h)


def mixed(net: Any, x: Tensor) -> Tensor:
    t = x.shape[1]
    return net.w2[:t, :t] @ F.relu(net.w1[:t, :t] @ net.a(x) + net.shift[:t])


def positions(net: Any, x: Tensor) -> Tensor:
    near = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None] + 7
    h = F.relu(net.a(x))
    return net.b(F.relu(net.table)[near].squeeze(-1) @ h)


def branch(
    decide: Callable[[Tensor], bool], other: Callable[[Tensor], Tensor] = torch.tanh
) -> Callable[[], nn.Module]:
    """A network that computes otherwise where a function of its hidden features says so."""

    def way(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        return net.b(other(h) if decide(h) else F.relu(h))

    return lambda: between(way)


def ladder(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    if x.shape[0] > 6:
        h = F.relu(h)
    elif x.shape[0] > 3:
        h = F.leaky_relu(h)
    else:
        h = F.gelu(h)
    return net.b(h)


def every_fourth_step(net: Any, x: Tensor) -> Tensor:
    h = F.relu(net.enter(x[:, 0]))
    for t in range(1, x.shape[1]):
        h = net.enter(x[:, t]) + net.stay(h)
        h = torch.tanh(h) if t % 4 == 3 else F.relu(h)
    return net.leave(h)


# model, traced shape, other shapes
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[int, ...]]]] = {
    "table of positions, sliced": (
        lambda: between(lambda m, x: m.b(F.relu(m.a(x) + m.p[: x.shape[1]])), p=rows(8, 3)),
        (2, 5, 4), [(2, 8, 4), (3, 1, 4)],
    ),
    "factors of positions": (
        lambda: between(lambda m, x: m.b(F.layer_norm(m.a(x) * m.p[: x.shape[1]], (3,), eps=0.0)),
                        p=rows(8, 3)),
        (2, 2, 4), [(2, 8, 4)],
    ),
    "one unit per position": (
        lambda: net_of(mixed, a=lin(4, 3), w1=rows(8, 8), w2=rows(8, 8), shift=rows(8, 1)),
        (2, 3, 4), [(2, 8, 4)],
    ),
    "relative positions": (lambda: between(positions, table=rows(15, 1)), (2, 3, 4), [(2, 8, 4)]),
    "ReLU RNN of one step": (
        lambda: net_of(lambda m, x: m.b(m.rnn(x)[0]), b=lin(3, 2),
                       rnn=nn.RNN(4, 3, 2, nonlinearity="relu")),
        (1, 2, 4), [(7, 2, 4), (2, 2, 4)],
    ),
    "loop of one step": (lambda: stepwise(loop), (2, 1, 4), [(2, 7, 4), (1, 2, 4)]),
    "one step, taken out": (
        lambda: between(lambda m, x: m.b(F.relu(m.a(x)).squeeze(1))), (2, 1, 4), [(2, 5, 4)],
    ),
    "as many repetitions as steps": (
        lambda: stepwise(repeated, bias=False), (2, 3, 4), [(2, 4, 4), (2, 1, 4), (1, 7, 4)],
    ),
    "a product over steps": (
        lambda: between(lambda m, x: m.b(F.relu(m.a(x)).prod(1))),
        (2, 3, 4), [(2, 5, 4), (2, 1, 4)],
    ),
    "padding seen by a single pixel": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
        ),
        (2, 2, 1, 1), [(2, 2, 6, 5), (1, 2, 1, 4)],
    ),
    "map of positions, cropped": (
        lambda: net_of(
            lambda m, x: m.b(F.relu(m.a(x) + m.p[..., : x.shape[2], : x.shape[3]])),
            a=nn.Conv2d(2, 3, 3, 1, 1), b=nn.Conv2d(3, 2, 1), p=rows(1, 3, 8, 8),
        ),
        (2, 2, 4, 4), [(2, 2, 8, 8), (1, 2, 5, 8)],
    ),
    "sums over a batch of one": (
        lambda: between(lambda m, x: m.b(F.relu(m.a(x)) - F.relu(m.a(x)).cumsum(0).flip(0))),
        (1, 4), [(5, 4)],
    ),
    "branch on a larger batch": (
        branch(lambda h: h.shape[0] > 4), (2, 4), [(4, 4), (5, 4), (9, 4)],
    ),
    "branch on the number of tokens": (
        branch(lambda h: h.numel() > 100), (2, 5, 4), [(8, 5, 4), (2, 30, 4)],
    ),
    "branches on branches": (lambda: between(ladder), (8, 4), [(6, 4), (3, 4), (2, 4)]),
    "another way for a batch of one": (
        branch(lambda h: h.shape[0] > 1, lambda h: F.relu(h - h.mean(0))), (3, 4), [(1, 4), (2, 4)],
    ),
    "every fourth step of a loop": (
        lambda: stepwise(every_fourth_step), (2, 3, 4), [(2, 6, 4)],
    ),
}  # fmt: skip


# what the code does at these sizes follows from the sizes themselves, so the graph speaks of other
# sizes under the condition that the operations are the same there
CONDITIONAL = (
    "a product over steps",
    "as many repetitions as steps",
    "every fourth step of a loop",
    *(name for name in CASES if name.startswith("branch")),
)


@pytest.mark.parametrize("name", CASES)
def test_rescaling_keeps_outputs_at_other_sizes(name: str) -> None:
    build, traced, others = CASES[name]
    model = build().double().eval()
    graph = ps.trace(model, torch.randn(traced).double())
    if name in CONDITIONAL:
        assert "sizes at which the model runs the same operations" in graph.range
        held = [ps.verify(model, torch.randn(at).double(), graph=graph).holds for at in others]
        assert not all(held)
        others = []
    samples = [torch.randn(shape).double() for shape in (traced, *others)]
    assert change(model, graph, *samples) < 1e-9


def test_counts_are_those_of_the_traced_length() -> None:
    model = CASES["ReLU RNN of one step"][0]()
    graph = ps.trace(model, torch.randn(1, 2, 4))
    # of one step, without the recurrent matrices
    assert graph.num_weights == sum(
        p.numel() for n, p in model.named_parameters() if "weight_hh" not in n
    )
    assert set(graph.unused) == set(graph.beyond) == {"rnn.weight_hh_l0", "rnn.weight_hh_l1"}
    assert graph.range == "inputs (1x2x4:float32), and other sizes as captured at (4x4x4:float32)"


def others(model: Any, h: Tensor) -> Tensor:
    return model.b(h) + ((h @ h.T) * (1 - torch.eye(len(h)).to(h))).sum(1, keepdim=True)


LATE = (torch.arange(20) > 4).double()[:, None]
HIDDEN = {
    "an empty slice": (lambda m, h: m.b(h) + h[:, 4:].tanh().sum((1, 2), keepdim=True), (2, 4, 3),
                       (2, 6, 3)),
    "empty differences": (lambda m, h: m.b(h) + h.diff(n=2, dim=1).tanh().sum((1, 2), True),
                          (2, 2, 3), (2, 5, 3)),
    "a part of a constant with only zeros": (lambda m, h: m.b(h + LATE[: h.shape[1]]), (2, 4, 3), (2, 6, 3)),  # noqa: E501
    "one sample compared with all others": (others, (1, 3), (4, 3)),
    "a remainder with as many steps as features": (
        lambda m, h: m.b(h.tanh() if h.shape[1] % 2 == 0 else h), (2, 3, 3), (2, 6, 3)
    ),
    "a margin of ones": (lambda m, h: m.b(F.pad(h, (0, 0, 0, -h.shape[1] % 4), value=1.0)),
                         (2, 4, 3), (2, 7, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_what_the_example_is_too_small_to_show(name: str) -> None:
    """The scales are those at all sizes, or a check at such a size refutes them."""
    function, small, large = HIDDEN[name]
    model = net_of(lambda m, x: function(m, m.a(x).relu()), a=lin(3, 4), b=lin(4, 2)).double()
    x = torch.randn(large).double()
    graph = ps.trace(model, torch.randn(small).double())
    assert change(model, graph, x) < 1e-5 or not ps.verify(model, x, graph=graph).holds
    assert "same operations" in graph.range or "captured at" in graph.range


def of_two(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Two inputs, whose lengths vary together."""
    return net.b(F.relu(net.a(x) + net.p[: x.shape[1]]) * mask[..., None])


SAME = "and other sizes at which the model runs the same operations"
# a model, its inputs, and the sizes for which its graph holds
RANGES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], str]] = {
    "one size": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(0), nn.Linear(18, 2)),
        (torch.randn(1, 1, 3, 3),),
        "(1x1x3x3:float32) only, because it was not captured at other sizes",
    ),
    "any size": (lambda: lin(3, 2), (torch.randn(2, 3),), f"(2x3:float32), {SAME}"),
    "two inputs": (
        lambda: between(of_two, p=rows(9, 3)),
        (torch.randn(2, 4, 4), torch.ones(2, 4)),
        "(2x4x4:float32, 2x4:float32), and other sizes as captured at (4x8x4:float32, 4x8:float32)",
    ),
}


@pytest.mark.parametrize("name", RANGES)
def test_a_graph_says_for_which_sizes_it_holds(name: str) -> None:
    make, inputs, said = RANGES[name]
    assert ps.trace(make(), *inputs).range == f"inputs {said}"


def test_unknown_sizes_are_refused() -> None:
    with pytest.raises(ps.InputError, match="expected 'any' or 'given'"):
        ps.trace(nn.Linear(3, 2), torch.randn(2, 3), sizes="all")
