"""The minimum of the orbit, against a generic convex solver, and what is left alone,
against linear programmes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import CASES, mlp
from hypothesis import given
from hypothesis import strategies as st
from oracles.strategies import modest
from scipy.optimize import linprog, minimize
from scipy.sparse import csr_array
from slow_names import slow_names
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.gauge.attained import ZEROS_LEAVE
from pathspace.graph.parts import WeightBlock


def change_and_sizes(
    model: nn.Module, graph: ps.ReductionGraph, p: float = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Edge by edge: how the log-scales move its logarithm, and ``|w|^p``."""
    own = dict(model.named_parameters(remove_duplicate=False))
    expand = np.asarray(graph.expand.todense())[:, 1:]
    rows, sizes = [], []
    for block in graph.blocks:
        head, tail = (
            ids.expand(block.shape).reshape(-1).numpy() for ids in (block.head, block.tail)
        )
        kept = np.ones(block.numel, bool)
        if block.unused is not None:
            kept = ~block.unused.expand(block.shape).reshape(-1).numpy()
        move = (
            np.sign(head)[:, None] * expand[abs(head)] - np.sign(tail)[:, None] * expand[abs(tail)]
        )
        rows.append(move[kept])
        sizes.append((own[block.name].detach().double().abs() ** p).reshape(-1).numpy()[kept])
    return np.concatenate(rows).astype(float), np.concatenate(sizes)


def convex_optimum(change: np.ndarray, sizes: np.ndarray, p: float, free: np.ndarray) -> float:
    """The least sum over ``phi``, other units kept, by a trust-region method that
    knows nothing of networks.
    """
    rows = change[:, free]

    def terms(phi: np.ndarray) -> np.ndarray:
        return sizes * np.exp(np.minimum(p * (rows @ phi), 600))

    found = minimize(
        lambda phi: terms(phi).sum(),
        np.zeros(rows.shape[1]),
        jac=lambda phi: p * rows.T @ terms(phi),
        hess=lambda phi: p * p * rows.T @ (terms(phi)[:, None] * rows),
        method="trust-exact",
        options={"gtol": 1e-9 * sizes.sum(), "maxiter": 5000},
    )
    return float(found.fun)


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in ((2, 5), (5, 6), (6, 4))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (5, 6, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Gates(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (
            nn.Linear(3, 4),
            kind(4, 5, batch_first=True),
            nn.Linear(5, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(F.relu(self.embed(x)))[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)))


class Product(nn.Module):
    """A product of two branches, normalised and not."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 5)
        self.norm, self.head = nn.LayerNorm(5) if norm else nn.ReLU(), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.c(F.relu(self.a(x)) * self.b(x))))


class LoopThenNorm(nn.Module):
    """A recurrent layer that only a normalisation reads: its hidden units
    shrink together for nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 3)
        self.rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.rnn(F.relu(self.embed(x)))[0]))


def _trained_norms() -> nn.Module:
    model = ConvNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        x = torch.randn(16, 2, 6, 6)
        optimizer.zero_grad()
        F.cross_entropy(model(x), (x.mean((1, 2, 3)) > 0).long()).backward()
        optimizer.step()
    return model.eval()


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "trained conv and norm": (_trained_norms, (2, 2, 6, 6)),
    "conv and norm in training": (ConvNorm, (2, 2, 6, 6)),
    "lstm": (lambda: Gates(nn.LSTM), (2, 4, 3)),
    "gru": (lambda: Gates(nn.GRU), (2, 4, 3)),
    "transformer": (Attention, (2, 4, 3)),
    "product": (lambda: Product(False), (2, 3)),
    "product and norm": (lambda: Product(True), (2, 3)),
    "loop and norm": (LoopThenNorm, (2, 4, 2)),
    "mlp": (lambda: mlp(3, 6, 6, 2), (2, 3)),
}
SMALL = (
    "residual_cnn",
    "tied_transposed",
    "tied_depth",
    "rnn_first_input_nobias",
    "tied_names",
    "conv_dead_taps",
)


def network(name: str) -> tuple[nn.Module, ps.ReductionGraph]:
    torch.manual_seed(1)
    if name in CASES:
        model, args = CASES[name]()
    else:
        model, args = NETS[name][0](), (torch.randn(NETS[name][1]),)
    model = model.double()
    return model, ps.trace(model, *(a.double() for a in args))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*NETS, *SMALL])
@pytest.mark.parametrize("p", [1, 2])
def test_the_minimum_is_that_of_a_generic_convex_solver(name: str, p: int) -> None:
    model, graph = network(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= torch.rand(()) * 3
    found = ps.balancing(model, graph, p=p)
    change, sizes = change_and_sizes(model, graph, p)
    free = np.setdiff1d(np.arange(graph.num_units), found.kept - 1)
    least = convex_optimum(change, sizes, p, free)
    assert found.before == pytest.approx(sizes.sum(), rel=1e-12)
    assert found.after <= least * (1 + 1e-9)
    assert found.after == pytest.approx(
        (sizes * np.exp(p * (change @ found.phi.numpy()))).sum(), rel=1e-9
    )
    assert not found.phi.numpy()[found.kept - 1].any()
    ps.balance_(model, graph, p=p)
    assert change_and_sizes(model, graph, p)[1].sum() == pytest.approx(found.after, rel=1e-9)


@pytest.mark.parametrize("name", ["trained conv and norm", "conv and norm in training"])
def test_what_comes_before_a_norm_is_balanced_against_it(name: str) -> None:
    """Only the channels that a norm reads are left alone; the channels it
    writes have both sides equal.
    """
    model, graph = network(name)
    found = ps.balancing(model, graph)
    assert [(len(units), "normalisation" in why) for why, units in found.left_alone.items()] == [
        (15, True)
    ]
    kernel = model.convs[0].weight.clone()
    smaller = ps.balancing(
        copy.deepcopy(model), ps.trace(model, torch.randn(2, 2, 6, 6).double(), norm_eps="respect")
    )
    assert found.after <= smaller.after * (1 + 1e-12)
    ps.balance_(model, graph)
    assert torch.equal(model.convs[0].weight, kernel)
    for norm, reader in zip(model.norms, [*model.convs[1:], model.head], strict=True):
        leaving = reader.weight.square().sum([d for d in range(reader.weight.dim()) if d != 1])
        torch.testing.assert_close(norm.weight.square() + norm.bias.square(), leaving)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", slow_names([*NETS, *SMALL], ["transformer"]))
def test_a_balanced_network_stays_and_copies_meet(name: str) -> None:
    model, graph = network(name)
    found = ps.balancing(model, graph)
    twin = copy.deepcopy(model)
    phi = torch.randn(graph.num_units, generator=torch.Generator().manual_seed(2)).double() * 3
    phi[torch.from_numpy(found.kept - 1)] = 0
    ps.rescale_(twin, graph, phi)
    ps.balance_(model, graph)
    ps.balance_(twin, graph)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)
    again = ps.balancing(model, graph)
    assert float(again.phi.abs().max()) < 1e-8
    assert again.after == pytest.approx(found.after, rel=1e-12)


def test_far_away_networks_are_found_back() -> None:
    """Scales apart by a hundred powers of ten, all in one direction or each in its own."""
    model, graph = network("mlp")
    least = ps.balancing(model, graph).after
    generator = torch.Generator().manual_seed(0)
    for phi in (
        torch.full((12,), 100.0),
        torch.linspace(-120, 120, 12),
        60 * torch.randn(12, generator=generator),
    ):
        twin = ps.rescale_(copy.deepcopy(model), graph, phi.double())
        assert ps.balancing(twin, graph).after == pytest.approx(least, rel=1e-9)


def test_what_cannot_be_balanced_is_refused_in_a_sentence() -> None:
    model, graph = network("mlp")
    with pytest.raises(ps.InputError, match="no parameter"):
        ps.balancing(nn.Linear(2, 2), graph)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    with pytest.raises(ps.InputError, match="finite"):
        ps.balance_(model, graph)


# --- which units are left alone


@st.composite
def signed_graphs(draw: st.DrawFn) -> ps.ReductionGraph:
    """Any edges between a root and some units, some scales opposite, some sums of two."""
    units = draw(st.integers(1, 6))
    derived = draw(st.integers(0, 2))
    forms = np.zeros((derived, units), np.int64)
    for row in forms:
        row[draw(st.integers(0, units - 1))] += 1
        row[draw(st.integers(0, units - 1))] += draw(st.sampled_from([1, 1, -1]))
    end = st.integers(0, units + derived)
    signed = st.tuples(end, st.sampled_from([1, 1, 1, -1])).map(lambda pair: pair[0] * pair[1])
    edges = draw(
        st.lists(
            st.tuples(signed, signed, st.sampled_from([1.0, 2.0, 0.25, 0.0])),
            min_size=1,
            max_size=14,
        )
    )
    model = mlp(1, 1)
    graph = ps.trace(model, torch.randn(1, 1))
    tail, head = (torch.tensor([edge[i] for edge in edges]) for i in (0, 1))
    weight = nn.Parameter(torch.tensor([edge[2] for edge in edges]).double())
    block = WeightBlock("w", (len(edges),), tail, head)
    return dataclasses.replace(
        graph, blocks=(block,), num_units=units, forms=csr_array(forms), parameters={"w": weight}
    )


class Holder(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.w = weight


def has_minimum(rows: np.ndarray) -> bool:
    """No direction shrinks a term without making another grow."""
    if not rows.size:
        return True
    slack = linprog(
        rows.sum(0), A_ub=rows, b_ub=np.zeros(len(rows)), bounds=(-1, 1), method="highs"
    )
    return bool(slack.fun > -1e-7)


@pytest.mark.slow
@given(signed_graphs())
@modest
def test_the_rest_has_a_minimum_and_no_unit_is_kept_in_vain(graph: ps.ReductionGraph) -> None:
    model = Holder(graph.parameters["w"])
    found = ps.balancing(model, graph, tolerance=1e-9)
    change, sizes = change_and_sizes(model, graph)
    change = change[sizes > 0]
    free = np.setdiff1d(np.arange(graph.num_units), found.kept - 1)
    assert has_minimum(change[:, free])
    touched = np.abs(change).sum(0) > 0
    for unit in found.kept - 1:
        more = np.union1d(free, [unit])
        # without it there would be no minimum, or it would not be unique
        unique = np.linalg.matrix_rank(change[:, more]) > np.linalg.matrix_rank(change[:, free])
        assert not touched[unit] or not has_minimum(change[:, more]) or not unique


class Triangle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 3)
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(F.relu(self.first(x)))))


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (lambda m: None, {"no weight leaves": 1}),
        (
            lambda m: m.second.weight[:, 1].zero_(),
            {"no weight leaves": 1, "that leave it are zero": 1},
        ),
        (
            lambda m: (m.first.weight[0].zero_(), m.first.bias[0].zero_()),
            {"no weight leaves": 1, "enter it are": 1},
        ),
        (
            lambda m: (
                m.first.weight[0].zero_(),
                m.first.bias[0].zero_(),
                m.second.weight[:, 0].zero_(),
            ),
            {"no weight leaves": 1, "at it are zero": 1},
        ),
    ],
)
def test_every_unit_left_alone_has_its_reason(
    change: Callable[[Triangle], None], reasons: dict[str, int]
) -> None:
    model, x = Triangle(), torch.randn(2, 2)
    with torch.no_grad():
        change(model)
    found = ps.balancing(model, ps.trace(model, x))
    assert {
        key: len(units) for key in reasons for why, units in found.left_alone.items() if key in why
    } == reasons
    assert len(found.kept) == sum(reasons.values())
    assert "left alone" in str(found)


def test_a_loop_keeps_one_unit_only() -> None:
    """Units that only each other's edges leave shrink together for nothing."""
    model, graph = network("loop and norm")
    found = ps.balancing(model, graph)
    assert [len(units) for units in found.left_alone.values()] == [1]
    assert "normalisation" in next(iter(found.left_alone))
    tail, head = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2, 3, 1])
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    block = WeightBlock("w", (4,), tail, head)
    loop = dataclasses.replace(
        graph, blocks=(block,), num_units=3, forms=graph.forms[:, :3], parameters={"w": weight}
    )
    found = ps.balancing(Holder(weight), loop)
    assert [units.tolist() for units in found.left_alone.values()] == [[3]]
    block = dataclasses.replace(block, head=torch.tensor([1, 2, 2, 1]))
    loop = dataclasses.replace(loop, blocks=(block,), num_units=2, forms=loop.forms[:, :2])
    found = ps.balancing(Holder(weight), loop)
    assert [(len(units), "closed walk" in why) for why, units in found.left_alone.items()] == [
        (1, True)
    ]


def test_a_group_that_ends_nowhere_is_found_through_matrices_with_zeros() -> None:
    """Of the last hidden layer every second unit leads nowhere, and with it
    what enters those alone.
    """
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        net[2].weight[::2, ::2] = 0
        net[2].weight[1::2, 1::2] = 0
        net[4].weight[:, ::2] = 0
    found = ps.balancing(net, ps.trace(net, torch.ones(1, 3)))
    assert {why: len(units) for why, units in found.left_alone.items()} == {ZEROS_LEAVE: 4}
    assert found.imbalance < 1e-9
