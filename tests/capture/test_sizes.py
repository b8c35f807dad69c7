"""Statements hold for inputs of other lengths, batches and images than the traced
ones, wherever the model runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.inference import units


class Net(nn.Module):
    """Parameters and modules by name, and a function of them."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def lin(n: int, m: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(n, m, bias=bias)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape)


def loop(net: Any, x: Tensor) -> Tensor:
    h: Any = None
    for t in range(x.shape[1]):
        h = F.relu(net.enter(x[:, t])) if h is None else F.relu(net.enter(x[:, t]) + net.stay(h))
    return net.leave(h)


def started(net: Any, x: Tensor) -> Tensor:
    h = net.start.expand(x.shape[0], -1)
    for t in range(x.shape[1]):
        h = F.relu(net.enter(x[:, t]) + net.stay(h))
    return net.leave(h)


def repeated(net: Any, x: Tensor) -> Tensor:
    h = F.relu(net.enter(x.mean(1)))
    for _ in range(x.shape[1]):
        h = F.relu(net.stay(h))
    return net.leave(h)


def first_steps(net: Any, x: Tensor) -> Tensor:
    return F.relu(
        torch.stack(
            [layer(x[:, t]) for t, layer in zip(range(x.shape[1]), net.each, strict=False)], 1
        )
    )


def mixed(net: Any, x: Tensor) -> Tensor:
    t = x.shape[1]
    return net.w2[:t, :t] @ F.relu(net.w1[:t, :t] @ net.a(x) + net.shift[:t])


def positions(net: Any, x: Tensor) -> Tensor:
    near = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None] + 7
    h = F.relu(net.a(x))
    return net.b(F.relu(net.table)[near].squeeze(-1) @ h)


def products(net: Any, x: Tensor) -> Tensor:
    near = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None] + 7
    return net.b(torch.einsum("bsd,tsd->btd", F.relu(net.a(x)), net.table[near]))


def branch(
    decide: Callable[[Tensor], bool], other: Callable[[Tensor], Tensor] = torch.tanh
) -> Callable[[], nn.Module]:
    """A network that computes otherwise where a function of its hidden features says so."""

    def way(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        return net.b(other(h) if decide(h) else F.relu(h))

    return lambda: Net(way, a=lin(4, 3), b=lin(3, 2))


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
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x) + m.p[: x.shape[1]])), a=lin(4, 3), b=lin(3, 2),
                    p=rows(8, 3)),
        (2, 5, 4), [(2, 8, 4), (3, 1, 4)],
    ),
    "table of positions, all but one row read": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x) + m.p[: x.shape[1]])), a=lin(4, 3), b=lin(3, 2),
                    p=rows(6, 3)),
        (2, 5, 4), [(2, 6, 4)],
    ),
    "table of positions, indexed": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x) + m.p[torch.arange(x.shape[1])])), a=lin(4, 3),
                    b=lin(3, 2),
                    p=rows(8, 3)),
        (2, 5, 4), [(2, 8, 4)],
    ),
    "table of positions from the end": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x) + m.p[-x.shape[1]:])), a=lin(4, 3), b=lin(3, 2),
                    p=rows(8, 3)),
        (2, 5, 4), [(2, 8, 4)],
    ),
    "time first": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x) + m.p[: x.shape[0]])), a=lin(4, 3), b=lin(3, 2),
                    p=rows(8, 1, 3)),
        (1, 2, 4), [(8, 2, 4)],
    ),
    "factors of positions": (
        lambda: Net(lambda m, x: m.b(F.layer_norm(m.a(x) * m.p[: x.shape[1]], (3,), eps=0.0)),
                    a=lin(4, 3), b=lin(3, 2),
                    p=rows(8, 3)),
        (2, 2, 4), [(2, 8, 4)],
    ),
    "one unit per position": (
        lambda: Net(mixed, a=lin(4, 3), w1=rows(8, 8), w2=rows(8, 8), shift=rows(8, 1)), (2, 3, 4),
        [(2, 8, 4)],
    ),
    "relative positions": (
        lambda: Net(positions, a=lin(4, 3), b=lin(3, 2), table=rows(15, 1)), (2, 3, 4), [(2, 8, 4)],
    ),
    "products with relative positions": (
        lambda: Net(products, a=lin(4, 3), b=lin(3, 2), table=rows(15, 3)), (2, 3, 4),
        [(2, 5, 4), (2, 8, 4)],
    ),
    "ReLU RNN of one step": (
        lambda: Net(lambda m, x: m.b(m.rnn(x)[0]), rnn=nn.RNN(4, 3, 2, nonlinearity="relu"),
                    b=lin(3, 2)),
        (1, 2, 4), [(7, 2, 4), (2, 2, 4)],
    ),
    "ReLU RNN of one step, batch first": (
        lambda: Net(lambda m, x: m.b(m.rnn(x)[0]), b=lin(6, 2),
                    rnn=nn.RNN(4, 3, 1, nonlinearity="relu", batch_first=True, bidirectional=True)),
        (1, 1, 4), [(2, 7, 4)],
    ),
    "LSTM of one step": (
        lambda: Net(lambda m, x: m.b(m.rnn(F.relu(m.a(x)))[0]), a=lin(4, 3), b=lin(2, 2),
                    rnn=nn.LSTM(3, 4, proj_size=2, batch_first=True)),
        (2, 1, 4), [(2, 7, 4)],
    ),
    "loop of one step": (
        lambda: Net(loop, enter=lin(4, 3), stay=lin(3, 3), leave=lin(3, 2)), (2, 1, 4),
        [(2, 7, 4), (1, 2, 4)],
    ),
    "loop of one step with a state of its own": (
        lambda: Net(started, start=rows(3), enter=lin(4, 3), stay=lin(3, 3), leave=lin(3, 2)),
        (2, 1, 4), [(2, 7, 4), (1, 2, 4)],
    ),
    "one step, taken out": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x)).squeeze(1)), a=lin(4, 3), b=lin(3, 2)),
        (2, 1, 4), [(2, 5, 4)],
    ),
    "as many repetitions as steps": (
        lambda: Net(repeated, enter=lin(4, 3, False), stay=lin(3, 3, False),
                    leave=lin(3, 2, False)),
        (2, 3, 4), [(2, 4, 4), (2, 1, 4), (1, 7, 4)],
    ),
    "a product over steps": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x)).prod(1)), a=lin(4, 3), b=lin(3, 2)), (2, 3, 4),
        [(2, 5, 4), (2, 1, 4)],
    ),
    "a layer for each step": (
        lambda: Net(lambda m, x: m.b(first_steps(m, x)),
                    each=nn.ModuleList(lin(4, 3) for _ in range(6)), b=lin(3, 2)),
        (2, 3, 4), [(2, 6, 4)],
    ),
    "attention to one token": (
        lambda: Net(lambda m, x: m.b(m.t(x, x, x)[0]),
                    t=nn.MultiheadAttention(4, 2, batch_first=True), b=lin(4, 2)),
        (1, 1, 4), [(2, 6, 4)],
    ),
    "padding seen by a single pixel": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(),
                              nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(),
                              nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
        (2, 2, 1, 1), [(2, 2, 6, 5), (1, 2, 1, 4)],
    ),
    "features of a single pixel": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.ReLU(), nn.Conv2d(3, 4, 3, 2, 1),
                              nn.ReLU(),
                              nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                              nn.Flatten(), nn.Linear(4, 2)),
        (1, 2, 4, 4), [(2, 2, 16, 9)],
    ),
    "holes wider than the image": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, dilation=9, padding=9), nn.ReLU(),
                              nn.Conv1d(3, 2, 1)),
        (2, 2, 4), [(2, 2, 30)],
    ),
    "causal convolutions": (
        lambda: Net(lambda m, x: m.c(F.relu(m.b(F.pad(F.relu(m.a(F.pad(x, (2, 0)))), (4, 0))))),
                    a=nn.Conv1d(2, 3, 3), b=nn.Conv1d(3, 4, 3, dilation=2), c=nn.Conv1d(4, 2, 1)),
        (2, 2, 1), [(1, 2, 9), (2, 2, 2)],
    ),
    "transposed convolution of a pixel": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2, 2), nn.ReLU(),
                              nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(),
                              nn.Conv2d(3, 2, 1)),
        (1, 2, 1, 1), [(2, 2, 3, 4)],
    ),
    "map of positions, cropped": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x) + m.p[:, : x.shape[2], : x.shape[3]])),
                    a=nn.Conv2d(2, 3, 3, 1, 1),
                    b=nn.Conv2d(3, 2, 1), p=rows(3, 8, 8)),
        (2, 2, 4, 4), [(2, 2, 8, 8), (1, 2, 5, 8)],
    ),
    "map of positions, resized": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x) + F.interpolate(m.p, x.shape[2:], mode="bilinear"))),  # noqa: E501
                    a=nn.Conv2d(2, 3, 3, 1, 1), b=nn.Conv2d(3, 2, 1), p=rows(1, 3, 4, 4)),
        (2, 2, 4, 4), [(2, 2, 9, 7)],
    ),
    "factors of positions, resized from one patch": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x) * F.interpolate(m.p, m.a(x).shape[2:])).mean((2, 3))),  # noqa: E501
                    a=nn.Conv2d(3, 5, 4, 4), b=lin(5, 2), p=rows(1, 5, 3, 3)),
        (2, 3, 4, 4), [(2, 3, 12, 12), (1, 3, 32, 48)],
    ),
    "positions met by a batch of one": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x) + m.p)), a=lin(4, 3), b=lin(3, 2), p=rows(4, 3)),
        (1, 4), [(4, 4)],
    ),
    "sums over a batch of one": (
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x)) - F.relu(m.a(x)).cumsum(0).flip(0)),
                    a=lin(4, 3), b=lin(3, 2)),
        (1, 4), [(5, 4)],
    ),
    "class token": (
        lambda: Net(lambda m, x: m.b(m.c(torch.cat([m.p.expand(x.shape[0], -1, -1), F.relu(m.a(x))], 1).mT).mT),  # noqa: E501
                    a=lin(4, 3), p=rows(1, 1, 3), b=lin(3, 2), c=nn.Conv1d(3, 3, 3, padding=1)),
        (2, 1, 4), [(2, 6, 4)],
    ),
    "branch on a larger batch": (branch(lambda h: h.shape[0] > 4), (2, 4),
                                 [(4, 4), (5, 4), (9, 4)]),
    "branch on a smaller batch": (branch(lambda h: h.size(0) <= 4), (9, 4),
                                  [(4, 4), (1, 4), (5, 4)]),
    "branch on a batch as large as the features": (branch(lambda h: h.shape[0] % 4 > 0), (4, 4), [(3, 4), (8, 4)]),  # noqa: E501
    "branch on half a length": (branch(lambda h: h.shape[1] // 2 >= 4), (2, 3, 4),
                                [(2, 7, 4), (2, 8, 4)]),
    "branch on an odd length": (branch(lambda h: bool(h.shape[1] % 2)), (2, 4, 4),
                                [(2, 5, 4), (2, 6, 4)]),
    "branch on the number of tokens": (branch(lambda h: h.numel() > 100), (2, 5, 4),
                                       [(8, 5, 4), (2, 30, 4)]),
    "branches on branches": (lambda: Net(ladder, a=lin(4, 3), b=lin(3, 2)), (8, 4),
                             [(6, 4), (3, 4), (2, 4)]),
    "another way for a batch of one": (
        branch(lambda h: h.shape[0] > 1, lambda h: F.relu(h - h.mean(0))), (3, 4), [(1, 4), (2, 4)],
    ),
    "every fourth step of a loop": (
        lambda: Net(every_fourth_step, enter=lin(4, 3), stay=lin(3, 3), leave=lin(3, 2)), (2, 3, 4),
        [(2, 6, 4)],
    ),
}  # fmt: skip


# what the code does at these sizes follows from the sizes themselves, so the graph speaks of other
# sizes under the condition that the operations are the same there
CONDITIONAL = frozenset(
    [
        "a product over steps",
        "as many repetitions as steps",
        "branch on a batch as large as the features",
        "branch on a larger batch",
        "branch on a smaller batch",
        "branch on an odd length",
        "branch on half a length",
        "branch on the number of tokens",
        "branches on branches",
        "every fourth step of a loop",
    ]
)


@torch.no_grad()
def changes(
    model: nn.Module, graph: ps.ReductionGraph, shapes: list[tuple[int, ...]]
) -> list[float]:
    """The relative change of the outputs at each shape under a random rescaling."""
    inputs = [torch.randn(shape).double() for shape in shapes]
    before = [model(x) for x in inputs]
    ps.rescale_(model, graph, torch.randn(graph.num_units).double())
    return [
        float((model(x) - y).abs().max() / y.abs().max())
        for x, y in zip(inputs, before, strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_rescaling_keeps_outputs_at_other_sizes(name: str) -> None:
    build, traced, others = CASES[name]
    torch.manual_seed(0)
    model = build().double().eval()
    graph = ps.trace(model, torch.randn(traced).double())
    if name in CONDITIONAL:
        assert "sizes at which the model runs the same operations" in graph.range
        held = [ps.verify(model, torch.randn(at).double(), graph=graph).holds for at in others]
        assert not all(held)
        others = []
    assert max(changes(model, graph, [traced, *others])) < 1e-9


def test_counts_are_those_of_the_traced_length() -> None:
    model = CASES["ReLU RNN of one step"][0]()
    graph = ps.trace(model, torch.randn(1, 2, 4))
    # of one step, without the recurrent matrices
    assert graph.num_weights == sum(
        p.numel() for n, p in model.named_parameters() if "weight_hh" not in n
    )
    assert set(graph.unused) == set(graph.beyond) == {"rnn.weight_hh_l0", "rnn.weight_hh_l1"}
    assert graph.range == "inputs (1x2x4:float32), and other sizes as captured at (4x4x4:float32)"


def test_a_model_of_one_size_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(0), nn.Linear(18, 2))
    assert (
        ps.trace(model, torch.randn(1, 1, 3, 3)).range
        == "inputs (1x1x3x3:float32) only, because it was not captured at other sizes"
    )
    assert "runs the same operations" in ps.trace(nn.Linear(3, 2), torch.randn(2, 3)).range


class Written(nn.Module):
    """A layer with rectifiers, and what a function makes of it."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.a, self.b = function, nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("late", (torch.arange(20) > 4).double()[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def last(model: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 5:] = h[:, 5:].tanh()
    return model.b(h)


def others(model: Any, h: Tensor) -> Tensor:
    return model.b(h) + ((h @ h.T) * (1 - torch.eye(len(h)).to(h))).sum(1, keepdim=True)


def masked(model: Any, h: Tensor) -> Tensor:
    return model.b(h) + (h @ h.T).masked_fill(torch.eye(len(h)).bool(), 0).sum(1, keepdim=True)


HIDDEN = {
    "an empty slice": (lambda m, h: m.b(h) + h[:, 4:].tanh().sum((1, 2), keepdim=True), (2, 4, 3),
                       (2, 6, 3)),
    "empty differences": (lambda m, h: m.b(h) + h.diff(n=2, dim=1).tanh().sum((1, 2), True),
                          (2, 2, 3), (2, 5, 3)),
    "an empty part that is written": (last, (2, 4, 3), (2, 7, 3)),
    "a part of a buffer with only zeros": (lambda m, h: m.b(h + m.late[: h.shape[1]]), (2, 4, 3), (2, 6, 3)),  # noqa: E501
    "one sample compared with all others": (others, (1, 3), (4, 3)),
    "one sample masked by itself": (masked, (1, 3), (4, 3)),
    "a comparison with as many steps as features": (
        lambda m, h: m.b(h.tanh() if h.shape[1] > 4 else h), (2, 3, 3), (2, 6, 3)
    ),
    "a remainder with as many steps as features": (
        lambda m, h: m.b(h.tanh() if h.shape[1] % 2 == 0 else h), (2, 3, 3), (2, 6, 3)
    ),
    "a power of a size": (lambda m, h: m.b(h.tanh() if h.shape[1] ** 2 > 16 else h), (2, 4, 3),
                          (2, 6, 3)),
    "a margin of ones": (lambda m, h: m.b(F.pad(h, (0, 0, 0, -h.shape[1] % 4), value=1.0)),
                         (2, 4, 3), (2, 7, 3)),
    "a bit of a size": (lambda m, h: m.b(h.tanh() if h.shape[1] & 1 else h), (2, 4, 3), (2, 7, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_what_the_example_is_too_small_to_show(name: str) -> None:
    """The scales are those at all sizes, or a check at such a size refutes them."""
    function, small, large = HIDDEN[name]
    model = Written(lambda m, x: function(m, m.a(x).relu())).double()
    x = torch.randn(large).double()
    graph = ps.trace(model, torch.randn(small).double())
    before, holds = model(x), ps.verify(model, x, graph=graph).holds
    ps.rescale_(model, graph, torch.randn(graph.num_units).double())
    assert torch.allclose(model(x), before) or not holds
    assert "same operations" in graph.range or "captured at" in graph.range


def test_a_bound_that_all_positions_pass_asks_for_no_other_sizes() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            steps = torch.arange(x.shape[1])
            seen = (steps >= 0) & ~(steps < 0)
            return self.b(F.relu(self.a(x)) * seen[:, None])

    graph = ps.trace(Masked(), torch.randn(4, 3, 3))
    assert graph.num_units == 4 and "captured at" not in graph.range


def test_a_check_of_features_is_no_branch() -> None:
    """What comes out the same at all sizes of inputs, and what refuses other sizes,
    leaves the range as it is.
    """

    def checked(net: Any, x: Tensor) -> Tensor:
        if x.shape[-1] != 4:
            raise ValueError("four features wanted")
        h = F.relu(net.a(x))
        return net.b(h if h.shape[-1] == net.a.weight.shape[0] else h + 1)

    graph = ps.trace(Net(checked, a=lin(4, 3), b=lin(3, 2)), torch.randn(2, 4))
    assert (
        graph.range
        == "inputs (2x4:float32), and other sizes at which the model runs the same operations"
    )


def test_lengths_of_several_inputs_vary_together() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.p = lin(4, 3), lin(3, 2), nn.Parameter(rows(9, 3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x) + self.p[: x.shape[1]]) * mask[..., None])

    model = Two()
    graph = ps.trace(model, torch.randn(2, 4, 4), kwargs={"mask": torch.ones(2, 4)})
    assert graph.range.endswith("captured at (4x8x4:float32, mask=4x8:float32)")


def test_unknown_sizes_are_refused() -> None:
    with pytest.raises(ps.InputError, match="expected 'any' or 'given'"):
        ps.trace(nn.Linear(3, 2), torch.randn(2, 3), sizes="all")


def test_nothing_is_solved_for_a_capture_that_another_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Side taps that see padding alone say at once that the model will be
    captured at a larger size.
    """
    solved = []
    known = units.effective
    monkeypatch.setattr(units, "effective", lambda *args: solved.append(args) or known(*args))
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv1d(3, 2, 3, padding=1))
    graph = ps.trace(model, torch.randn(1, 2, 1))
    assert "other sizes as captured" in graph.range
    assert (graph.num_units, len(solved)) == (3, 1)


@functools.lru_cache
def plan(shape: tuple[int, ...], heads: int) -> tuple[int, ...]:
    return (*shape[:2], heads, shape[2] // heads)


class Planned(nn.Module):
    """Keeps what it computes from sizes, as einops does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 8)
        self.places = nn.Parameter(torch.randn(1, 64, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places[:, : x.shape[1]]
        for layer in (self.a, self.b):
            x = layer(x).relu()
            x = x.reshape(plan(tuple(x.shape), 2)).flatten(2)
        return x
