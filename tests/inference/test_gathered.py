"""Rows that data picks: a scale per row where nothing feels it, checked against a
numerical bound and other tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.scales import at_most, outputs
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
    """Largest relative change of the outputs under random rescalings, on other
    inputs than the traced ones.
    """
    worst = 0.0
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _ in range(3):
            phi = torch.randn(graph.num_units, generator=generator, dtype=torch.float64)
            other = ps.rescale_(copy.deepcopy(model), graph, phi)
            for sample in samples:
                before, after = outputs(model(*sample)), outputs(other(*sample))
                worst = max(worst, float((before - after).abs().max() / before.abs().max()))
    return worst


def tokens(length: int = 6) -> Sample:
    return (torch.randint(0, WORDS, (2, length)),)


def vectors(rows: int = 8) -> Sample:
    return (torch.randn(rows, WIDTH).double() * 10 ** (4 * torch.rand(rows, 1).double() - 2),)


class Language(nn.Module):
    """Embedding, perhaps something, a normalisation, a head."""

    def __init__(self, norm: str = "rms", tied: bool = False, between: str = "") -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.RMSNorm(WIDTH, eps=0) if norm == "rms" else nn.LayerNorm(WIDTH, eps=0)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.map = (
            nn.Linear(WIDTH, WIDTH, bias=between == "biased")
            if between in ("map", "biased")
            else None
        )
        self.position = nn.Parameter(torch.zeros(6, WIDTH)) if between == "position" else None
        self.between = between

    def forward(self, t: Tensor) -> Tensor:
        h = self.table(t)
        if self.map is not None:
            h = self.map(h)
        if self.position is not None:
            h = h + self.position[: t.shape[1]]
        if self.between == "stream":
            h = h + self.norm(h)
        if self.between == "mixed":
            h = h + h.mean(1, keepdim=True)
        if self.between == "neighbours":
            h = torch.cat([h[:, :1], h[:, 1:] + h[:, :-1]], 1)
        if self.between == "first":
            h = torch.cat([h[:, :1] + 1, h[:, 1:]], 1)
        if self.between == "leaky":
            h = F.leaky_relu(h, 0.2)
        return self.head(self.norm(h))


class Lookup(nn.Module):
    """A table read in other ways, and normalised by hand."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.head, self.how = (
            nn.Parameter(torch.zeros(WORDS, WIDTH)),
            nn.Linear(WIDTH, 3),
            how,
        )

    def forward(self, t: Tensor) -> Tensor:
        if self.how == "index":
            h = self.table[t]
        elif self.how == "index_select":
            h = self.table.index_select(0, t.reshape(-1)).reshape(*t.shape, WIDTH)
        else:
            h = F.embedding(t, self.table, padding_idx=0)
        return self.head(h / h.square().mean(-1, keepdim=True).sqrt())


class Similarity(nn.Module):
    """Cosines between words and contexts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.contexts = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)

    def forward(self, t: Tensor) -> Tensor:
        return (
            F.normalize(self.words(t), dim=-1, eps=0)
            @ F.normalize(self.contexts.weight, dim=-1, eps=0).T
        )


class TwoTables(nn.Module):
    """Two tables read by one index or by two, multiplied or added."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH), how
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=0), nn.Linear(WIDTH, 3)

    def forward(self, t: Tensor) -> Tensor:
        other = (3 * t + 1) % WORDS if "hash" in self.how else t
        a, b = self.a(t), self.b(other)
        return self.head(self.norm(a + b if "sum" in self.how else a * b))


class Twice(nn.Module):
    """One table read by two indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.RMSNorm(WIDTH, eps=0),
            nn.Linear(WIDTH, 3),
        )

    def forward(self, t: Tensor, u: Tensor) -> Tensor:
        return self.head(self.norm(self.table(t))) + self.head(self.norm(self.table(u)))


class Bags(nn.Module):
    """Means of rows have one scale, whatever is in a bag."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(WORDS, WIDTH, mode="sum" if weighted else "mean")
        self.norm, self.head, self.weighted = (
            nn.RMSNorm(WIDTH, eps=0),
            nn.Linear(WIDTH, 3),
            weighted,
        )

    def forward(self, t: Tensor) -> Tensor:
        weights = (t + 1).to(self.head.weight.dtype) if self.weighted else None
        return self.head(self.norm(self.bags(t, per_sample_weights=weights)))


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
        p = self.router(x).softmax(-1)
        if self.how == "top2":
            value, chosen = p.topk(2, -1)
            value = value / value.sum(-1, keepdim=True)
            h = torch.einsum("bkhd,bd->bkh", self.up[chosen], x).relu()
            return (value[:, :, None] * torch.einsum("bkdh,bkh->bkd", self.down[chosen], h)).sum(1)
        value, chosen = p.max(-1)
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
        if self.how == "capacity":
            hot = F.one_hot(chosen, EXPERTS)
            kept = (hot.cumsum(0) * hot).sum(-1) <= 2
            return torch.where(kept[:, None], value[:, None] * y, x)
        return value[:, None] * y


class SpecialExpert(Experts):
    """One expert is used directly, too: by every token, through a tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.up[0].T).tanh() @ self.down[0].T


# model, its inputs, units counted by hand
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Sample], int]] = {
    "rms": (Language, tokens, WORDS + WIDTH),
    "layer norm": (lambda: Language("layer"), tokens, WORDS + WIDTH),
    "leaky relu between": (lambda: Language(between="leaky"), tokens, WORDS + WIDTH),
    # W is an edge between features of rows and what is normalised
    "linear between": (lambda: Language(between="map"), tokens, WORDS + WIDTH + WIDTH),
    "bias between": (lambda: Language(between="biased"), tokens, 1 + WIDTH + WIDTH),
    "tied": (lambda: Language(tied=True), tokens, 1),
    "positions": (lambda: Language(between="position"), tokens, 1 + WIDTH),
    "stream": (lambda: Language(between="stream"), tokens, 1),
    "mixed tokens": (lambda: Language(between="mixed"), tokens, 1 + WIDTH),
    "neighbours": (lambda: Language(between="neighbours"), tokens, 1 + WIDTH),
    "first token is special": (lambda: Language(between="first"), tokens, WIDTH),
    "index": (lambda: Lookup("index"), tokens, WORDS),
    "index_select": (lambda: Lookup("index_select"), tokens, WORDS),
    "padding": (lambda: Lookup("padding"), tokens, WORDS),
    "cosines": (Similarity, tokens, 2 * WORDS),
    "sum of two": (lambda: TwoTables("sum"), tokens, WORDS + WIDTH),
    "hashed sum": (lambda: TwoTables("hash sum"), tokens, 1 + WIDTH),
    "two indices": (Twice, lambda: (*tokens(), *tokens()), WORDS + WIDTH),
    "bags": (lambda: Bags(False), tokens, 1 + WIDTH),
    "weighted bags": (lambda: Bags(True), tokens, 1 + WIDTH),
    "experts": (lambda: Experts("one"), vectors, EXPERTS * HIDDEN),
    "two experts": (lambda: Experts("top2"), vectors, EXPERTS * HIDDEN),
    "experts with bias": (lambda: Experts("bias"), vectors, EXPERTS * HIDDEN),
    # (a gate and what it multiplies: all rows share these scales)
    "gated experts": (lambda: Experts("gate"), vectors, 2 * HIDDEN),
    "shared output": (lambda: Experts("shared"), vectors, HIDDEN),
    "full experts pass": (lambda: Experts("capacity"), vectors, EXPERTS * HIDDEN),
    "one expert's units read by another": (lambda: Experts("swapped"), vectors, HIDDEN),
    "tokens meet in experts": (lambda: Experts("mixed tokens"), vectors, HIDDEN),
}


# where the numerical bound leaves nothing open
CLOSED = (
    "rms",
    "linear between",
    "cosines",
    "two indices",
    "experts",
    "tied",
    "positions",
)


@pytest.mark.parametrize("name", CASES)
def test_units_of_rows_are_those_counted_and_no_more_exist(name: str) -> None:
    make, sample, units = CASES[name]
    torch.manual_seed(0)
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


@pytest.mark.parametrize("name", ["hashed product", "another expert", "a special expert"])
def test_rows_read_in_two_ways_are_sound(name: str) -> None:
    models: dict[str, tuple[nn.Module, Callable[[], Sample]]] = {
        "hashed product": (TwoTables("hash product"), tokens),
        "another expert": (Experts("other expert"), vectors),
        "a special expert": (SpecialExpert("one"), vectors),
    }
    torch.manual_seed(0)
    model, sample = randomised(models[name][0]), models[name][1]
    samples = [sample() for _ in range(12)]
    graph = ps.trace(model, *samples[0])
    assert worst_change(model, graph, [*samples, *(sample() for _ in range(12))]) < 1e-11


def test_it_does_not_matter_which_rows_were_read() -> None:
    model = randomised(Language())
    few = ps.trace(model, torch.zeros(2, 6, dtype=torch.long))
    assert few.num_units == WORDS + WIDTH
    assert worst_change(model, few, [tokens(length) for length in (1, 3, 6, 9)]) < 1e-12


def test_one_position_does_not_show_what_is_done_to_several() -> None:
    model = randomised(Language(between="mixed"))
    graph = ps.trace(model, torch.zeros(2, 1, dtype=torch.long))
    assert worst_change(model, graph, [tokens(length) for length in (1, 3, 6)]) < 1e-12


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
    monkeypatch.setattr("pathspace.inference.parameter_scales.MOST_GATHERED", 16 * (HIDDEN + WIDTH))
    torch.manual_seed(0)
    model = randomised(Experts("one"))
    assert ps.trace(model, *vectors()).num_units == EXPERTS * HIDDEN
    monkeypatch.setattr("pathspace.inference.parameter_scales.MOST_GATHERED", 8)
    graph = ps.trace(model, *vectors())
    assert graph.num_units < EXPERTS * HIDDEN
    assert worst_change(model, graph, [vectors() for _ in range(4)]) < 1e-11


def test_theorems_hold_with_units_of_rows() -> None:
    for model, sample in ((Language(), tokens(8)), (Experts("bias"), vectors())):
        certificate = ps.verify(
            randomised(model).float(), *(s.float() if s.is_floating_point() else s for s in sample)
        )
        assert certificate.holds


# --- positions known beforehand


class Spread(nn.Module):
    """Units sent to other places."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.head, self.how = nn.Linear(WIDTH, 4), nn.Linear(3, 2), how
        self.register_buffer("places", torch.tensor([0, 2, 2, 1]))

    def forward(self, x: Tensor) -> Tensor:
        h: Any = self.a(x).relu()
        z, wide = h.new_zeros(h.shape[0], 3), self.places.expand(h.shape)
        match self.how:
            case "index_add":
                z = z.index_add(1, self.places, h)
            case "scatter_add":
                z = z.scatter_add(1, wide, h)
            case "scatter_max":
                z = z.scatter_reduce(1, wide, h, "amax", include_self=False)
            case "scatter_mean":
                z = z.scatter_reduce(1, wide, h, "mean")
            case "index_put":
                z = z.index_put(
                    (torch.arange(len(h))[:, None], self.places[None]), h, accumulate=True
                )
            case "index_add to itself":
                z = h[:, :3].index_add(1, self.places[:1], h[:, 3:])
            case "data":
                z = z.scatter_add(1, (x > 0).long()[:, :4] + 1, h)
            case "index_copy":
                z = h.new_ones(h.shape[0], 4).index_copy(1, torch.tensor([3, 1, 0, 2]), h)[
                    :, [0, 1, 3]
                ]
            case "index_fill":
                z = h.index_fill(1, torch.tensor([1]), 1.0)[:, :3]
        return self.head(z)


SPREAD = {
    "index_add": 3, "scatter_add": 3, "scatter_max": 3, "scatter_mean": 3, "index_put": 3,
    "index_add to itself": 3, "data": 1, "index_copy": 3, "index_fill": 2,
}  # fmt: skip


@pytest.mark.parametrize("how", SPREAD)
def test_known_positions_keep_units_apart(how: str) -> None:
    torch.manual_seed(0)
    model = randomised(Spread(how))
    samples = [vectors() for _ in range(12)]
    graph = ps.trace(model, *samples[0])
    assert graph.num_units == SPREAD[how]
    assert worst_change(model, graph, samples) < 1e-11
