"""Rows that data picks: a scale per row where nothing feels it, within a numerical bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import network
from oracles.scales import at_most
from rescaled import change, traced
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps

pytestmark = pytest.mark.usefixtures("no_rule_fails")

WORDS, WIDTH, HIDDEN, EXPERTS = 7, 4, 5, 3
Sample = tuple[Tensor, ...]


def randomised(model: nn.Module) -> nn.Module:
    """In place: float64, generic weights."""
    model = model.double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def worst_change(model: nn.Module, graph: ps.ReductionGraph, samples: list[Sample]) -> float:
    """Under several random rescalings, on other inputs than the traced ones."""
    return max(change(model, graph, *samples) for _ in range(3))


def tokens(length: int = 6) -> Sample:
    return (torch.randint(0, WORDS, (2, length)),)


def vectors(rows: int = 8) -> Sample:
    return (torch.randn(rows, WIDTH).double() * 10 ** (4 * torch.rand(rows, 1).double() - 2),)


# what is done to the rows of a table before they are normalised
ROWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "": lambda net, h: h,
    "map": lambda net, h: net.map(h),
    "biased": lambda net, h: net.biased(h),
    "position": lambda net, h: h + net.position[: h.shape[1]],
    "stream": lambda net, h: h + net.norm(h),
    "mixed": lambda net, h: h + h.mean(1, keepdim=True),
    "first": lambda net, h: torch.cat([h[:, :1] + 1, h[:, 1:]], 1),
}


def language(between: str = "", layer: bool = False, tied: bool = False) -> nn.Module:
    """Embedding, perhaps something, a normalisation, a head."""
    own: dict[str, Any] = {
        "map": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        "biased": lambda: nn.Linear(WIDTH, WIDTH),
        "position": lambda: nn.Parameter(torch.zeros(6, WIDTH)),
    }
    model = network(
        lambda net, t: net.head(net.norm(ROWS[between](net, net.table(t)))),
        table=nn.Embedding(WORDS, WIDTH),
        norm=nn.LayerNorm(WIDTH, eps=0) if layer else nn.RMSNorm(WIDTH, eps=0),
        head=nn.Linear(WIDTH, WORDS, bias=False),
        **({between: own[between]()} if between in own else {}),
    )
    if tied:
        model.head.weight = model.table.weight
    return model


# a table read in other ways
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda table, t: table[t],
    "index_select": lambda table, t: table.index_select(0, t.reshape(-1)).reshape(*t.shape, WIDTH),
    "padding": lambda table, t: F.embedding(t, table, padding_idx=0),
}


def lookup(how: str) -> nn.Module:
    """Rows that are normalised by hand."""

    def forward(net: Any, t: Tensor) -> Tensor:
        h = READ[how](net.table, t)
        return net.head(h / h.square().mean(-1, keepdim=True).sqrt())

    table = nn.Parameter(torch.zeros(WORDS, WIDTH))
    return network(forward, table=table, head=nn.Linear(WIDTH, 3))


def tables(forward: Callable[..., Tensor], parts: str = "a b norm head") -> nn.Module:
    """Of two tables, a normalisation and a head, what is used."""
    held = {name: nn.Embedding(WORDS, WIDTH) for name in "ab"}
    held |= {"norm": nn.RMSNorm(WIDTH, eps=0), "head": nn.Linear(WIDTH, 3)}
    return network(forward, **{name: held[name] for name in parts.split()})


def hashed(t: Tensor) -> Tensor:
    return (3 * t + 1) % WORDS


def cosines(net: Any, t: Tensor) -> Tensor:
    """Between words and contexts."""
    contexts = F.normalize(net.b.weight, dim=-1, eps=0)
    return F.normalize(net.a(t), dim=-1, eps=0) @ contexts.T


def bags() -> nn.Module:
    """Means of rows have one scale, whatever is in a bag."""
    held = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
    norm, head = nn.RMSNorm(WIDTH, eps=0), nn.Linear(WIDTH, 3)
    return network(lambda net, t: net.head(net.norm(net.bags(t))), bags=held, norm=norm, head=head)


class Experts(nn.Module):
    """A router and experts picked by its choice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN)) if "bias" in how else None
        self.gate = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDTH)) if "gate" in how else None
        self.down = (
            nn.Parameter(torch.zeros(EXPERTS, WIDTH, HIDDEN)) if "shared" not in how else None
        )
        self.shared = nn.Linear(HIDDEN, WIDTH, bias=False) if "shared" in how else None
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        value, chosen = self.router(x).softmax(-1).max(-1)
        h = torch.bmm(self.up[chosen], x[:, :, None])[:, :, 0]
        if self.bias is not None:
            h = h + self.bias[chosen]
        h = h.relu()
        if self.gate is not None:
            h = h * torch.bmm(self.gate[chosen], x[:, :, None])[:, :, 0]
        if self.how == "mixed tokens":
            h = h + h.roll(1, 0)
        if self.how == "swapped":
            h = h.flip(0)
        if self.how == "other expert":
            chosen = EXPERTS - 1 - chosen
        y = (
            self.shared(h)
            if self.shared is not None
            else torch.bmm(self.down[chosen], h[:, :, None])[:, :, 0]
        )
        return value[:, None] * y


def special(net: Any, x: Tensor) -> Tensor:
    """One expert is used directly, too: by every token, through a tanh."""
    experts = net.experts
    return experts(x) + (x @ experts.up[0].T).tanh() @ experts.down[0].T


# model, its inputs, units counted by hand
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Sample], int]] = {
    "rms": (language, tokens, WORDS + WIDTH),
    "layer norm": (lambda: language(layer=True), tokens, WORDS + WIDTH),
    # W is an edge between features of rows and what is normalised
    "linear between": (lambda: language("map"), tokens, WORDS + WIDTH + WIDTH),
    "bias between": (lambda: language("biased"), tokens, 1 + WIDTH + WIDTH),
    "tied": (lambda: language(tied=True), tokens, 1),
    "positions": (lambda: language("position"), tokens, 1 + WIDTH),
    "stream": (lambda: language("stream"), tokens, 1),
    "first token is special": (lambda: language("first"), tokens, WIDTH),
    **{how: (partial(lookup, how), tokens, WORDS) for how in READ},
    "cosines": (lambda: tables(cosines, "a b"), tokens, 2 * WORDS),
    "sum of two": (
        lambda: tables(lambda net, t: net.head(net.norm(net.a(t) + net.b(t)))),
        tokens,
        WORDS + WIDTH,
    ),
    "two indices": (
        lambda: tables(
            lambda net, t, u: sum(net.head(net.norm(net.a(i))) for i in (t, u)), "a norm head"
        ),
        lambda: (*tokens(), *tokens()),
        WORDS + WIDTH,
    ),
    "bags": (bags, tokens, 1 + WIDTH),
    "experts": (lambda: Experts("one"), vectors, EXPERTS * HIDDEN),
    "experts with bias": (lambda: Experts("bias"), vectors, EXPERTS * HIDDEN),
    # (a gate and what it multiplies: all rows share these scales)
    "gated experts": (lambda: Experts("gate"), vectors, 2 * HIDDEN),
    "shared output": (lambda: Experts("shared"), vectors, HIDDEN),
    "one expert's units read by another": (lambda: Experts("swapped"), vectors, HIDDEN),
    "tokens meet in experts": (lambda: Experts("mixed tokens"), vectors, HIDDEN),
}


# where the numerical bound leaves nothing open
CLOSED = ("rms", "linear between", "cosines", "two indices", "experts", "tied", "positions")


@pytest.mark.parametrize("name", CASES)
def test_units_of_rows_are_those_counted_and_no_more_exist(name: str) -> None:
    make, sample, units = CASES[name]
    model = randomised(make())
    samples = [sample() for _ in range(12)]
    graph = ps.trace(model, *samples[0])
    assert graph.num_units == units
    assert worst_change(model, graph, [*samples, *(sample() for _ in range(12))]) < 1e-11
    stacks = [
        key for key, parameter in model.named_parameters() if parameter.dim() == 3 or key == "bias"
    ]
    bound = at_most(model, samples, stacks)
    assert bound == units if name in CLOSED else bound >= units


SOUND: dict[str, tuple[Callable[[], nn.Module], Callable[[], Sample]]] = {
    "hashed product": (
        lambda: tables(lambda net, t: net.head(net.norm(net.a(t) * net.b(hashed(t))))),
        tokens,
    ),
    "another expert": (lambda: Experts("other expert"), vectors),
    "a special expert": (lambda: network(special, experts=Experts("one")), vectors),
}


@pytest.mark.parametrize("name", SOUND)
def test_rows_read_in_two_ways_are_sound(name: str) -> None:
    make, sample = SOUND[name]
    model = randomised(make())
    samples = [sample() for _ in range(24)]
    assert worst_change(model, ps.trace(model, *samples[0]), samples) < 1e-11


@pytest.mark.parametrize(
    ("between", "positions", "units"), [("", 6, WORDS + WIDTH), ("mixed", 1, 1 + WIDTH)]
)
def test_few_rows_show_what_is_done_to_others(between: str, positions: int, units: int) -> None:
    """It does not matter which rows were read, nor at how many positions."""
    model = randomised(language(between))
    few = ps.trace(model, torch.zeros(2, positions, dtype=torch.long))
    assert few.num_units == units
    assert worst_change(model, few, [tokens(length) for length in (1, 3, 6, 9)]) < 1e-12


def test_units_of_rows_hold_at_eps_0_only() -> None:
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, 3)
    )
    graph = ps.trace(model, *tokens())
    assert graph.num_units == WORDS + WIDTH
    assert ps.trace(model, *tokens(), norm_eps="respect").num_units == WIDTH
    assert len(graph.approximate) == WORDS


def test_large_tables_of_matrices_are_followed_without_their_scalars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pathspace.inference.scales.MOST_GATHERED", 16 * (HIDDEN + WIDTH))
    torch.manual_seed(0)
    model = randomised(Experts("one"))
    assert ps.trace(model, *vectors()).num_units == EXPERTS * HIDDEN
    monkeypatch.setattr("pathspace.inference.scales.MOST_GATHERED", 8)
    graph = ps.trace(model, *vectors())
    assert graph.num_units < EXPERTS * HIDDEN
    assert worst_change(model, graph, [vectors() for _ in range(4)]) < 1e-11


# --- products of rows: units counted by hand, paths through every pair of rows


COLUMNS, COUNT = 2, 5
Rows = tuple[Tensor, ...]


def products(form: str) -> Any:
    """A linear layer on products of rows of three tables, which one index of three columns reads.

    ``a_k`` in the comments below is the log-scale of column k of table a.
    """

    def read(model: Any, index: Tensor) -> Tensor:
        return torch.cat(
            FORMS[form][0](model, tuple(model.get_submodule(t)(index) for t in "abc")), 1
        )

    model: Any = network(
        lambda net, index: net.out(read(net, index)),
        **{name: nn.Embedding(COUNT, COLUMNS) for name in "abc"},
        first=nn.Linear(COLUMNS, COLUMNS),
        second=nn.Linear(COLUMNS, COLUMNS),
    )
    model.out = nn.Linear(read(model, INDEX).shape[1], 3)
    return model.double()


INDEX = torch.cartesian_prod(*[torch.arange(COUNT)] * 3)
Form = Callable[[Any, Rows], list[Tensor]]


def _dense(model: Any, rows: Rows) -> list[Tensor]:
    a, b = rows[:2]
    return [
        torch.relu(model.first(a[:, 0])) * b[:, 1],
        torch.relu(model.second(a[:, 1])) * b[:, 2],
    ]


FORMS: dict[str, tuple[Form, int]] = {
    # all of a_k and b_k, and c_k where it is read
    "two tables": (lambda _, r: [r[0][:, 0] * r[1][:, 1]], 4),
    "three": (lambda _, r: [r[0][:, 0] * r[1][:, 1] * r[2][:, 2], r[1][:, 0] * r[2][:, 1]], 6),
    # c_k = a_k + b_k
    "added": (
        lambda _, r: [torch.addcmul(r[2][:, i], r[0][:, i], r[1][:, 1 - i]) for i in (0, 1)],
        4,
    ),
    # b is fixed by the 1
    "divided": (
        lambda _, r: [r[0][:, 0] / (1 + r[1][:, 1].abs()), r[0][:, 1] * r[1][:, 0]],
        2,
    ),
    # a_k + b_k is the same for all k
    "summed": (
        lambda _, r: [(r[0][:, i] * r[1][:, i + 1]).sum(-1, keepdim=True) for i in (0, 1)],
        3,
    ),
    # a_k, b_k, and the outputs of two layers
    "with layers": (_dense, 8),
    # the rows of one table
    "one table": (lambda _, r: [r[0][:, 0] * r[0][:, 1]], 2),
    "factorisation machine": (lambda _, r: [r[0].sum(1) ** 2 - (r[0] ** 2).sum(1)], 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_products_of_rows_have_the_units_counted_by_hand(form: str) -> None:
    model = products(form)
    graph = traced(model, INDEX, units=FORMS[form][1], within=1e-5)
    assert not graph.pinned or form == "divided"
    certificate = ps.verify(model, INDEX)
    assert certificate.holds, certificate
    if form != "divided":  # (a quotient has no paths)
        found = certificate.theorem3["evidence"]
        assert found.endswith(f"paths of the network have rank {graph.dimension}"), found


PLACES = torch.tensor([0, 2, 2, 1])


def wide(h: Tensor) -> Tensor:
    return PLACES.expand(h.shape)


def both(h: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(len(h))[:, None], PLACES[None]


# units sent to other places: the empty rows, the features, the input -> the units
SPREAD: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "index_add": (lambda z, h, x: z.index_add(1, PLACES, h), 3),
    "scatter_add": (lambda z, h, x: z.scatter_add(1, wide(h), h), 3),
    "scatter_max": (lambda z, h, x: z.scatter_reduce(1, wide(h), h, "amax", include_self=False), 3),
    "scatter_mean": (lambda z, h, x: z.scatter_reduce(1, wide(h), h, "mean"), 3),
    "index_put": (lambda z, h, x: z.index_put(both(h), h, accumulate=True), 3),
    "index_add to itself": (lambda z, h, x: h[:, :3].index_add(1, PLACES[:1], h[:, 3:]), 3),
    "data": (lambda z, h, x: z.scatter_add(1, (x > 0).long()[:, :4] + 1, h), 1),
    "index_copy": (
        lambda z, h, x: torch.ones_like(h).index_copy(1, torch.tensor([3, 1, 0, 2]), h)[:, :3],
        3,
    ),
    "index_fill": (lambda z, h, x: h.index_fill(1, torch.tensor([1]), 1.0)[:, :3], 2),
}


@pytest.mark.parametrize("how", SPREAD)
def test_known_positions_keep_units_apart(how: str) -> None:
    operation, units = SPREAD[how]

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x).relu()
        return net.head(operation(h.new_zeros(h.shape[0], 3), h, x))

    model = randomised(network(forward, a=nn.Linear(WIDTH, 4), head=nn.Linear(3, 2)))
    samples = [vectors() for _ in range(12)]
    graph = ps.trace(model, *samples[0])
    assert graph.num_units == units
    assert worst_change(model, graph, samples) < 1e-11
