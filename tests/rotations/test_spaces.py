"""Spaces of features: which matrices may mix them, and that random ones change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compositions import built, distance, inputs, planned
from rotated import in_turn, outputs
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.entry import load

import pathspace as ps

pytestmark = pytest.mark.filterwarnings("ignore")
# rotations pass norms and rotary embeddings that some models compute in float32
TOLERANCE = 1e-6
ZOO = {f"{name} {mode}": (entry, mode) for name, entry in load().items() for mode in entry.modes}
FAMILIES = (
    "hf_llama_eager_tied", "hf_qwen3", "hf_phi3", "hf_gpt2", "hf_opt", "hf_gpt_neox", "hf_falcon",
    "hf_mixtral", "hf_deepseek_v3", "hf_bert", "experts_top2", "lora", "detr", "vit_small",
)  # fmt: skip


class Llama(nn.Module):
    """Two heads of 4 features that share keys and values, without a rotary embedding."""

    def __init__(self, gate: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(11, 8), gate
        self.norm, self.last = nn.RMSNorm(8), nn.RMSNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.o, self.head = nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.up, self.gated, self.down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        z = self.norm(x)
        q = self.q(z).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = (part(z).unsqueeze(1).expand(-1, 2, -1, -1) for part in (self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        x = x + self.down(self.up(x) * self.gate(self.gated(x)))
        return self.head(self.last(x))


def labels(found: Any) -> list[tuple[str, str, int, int]]:
    return [(space.name, space.group, space.size, space.count) for space in found.free]


def test_the_spaces_of_a_language_model() -> None:
    model, words = Llama(), torch.randint(11, (2, 5))
    found = ps.spaces(model, words)
    assert labels(found) == [
        ("table.weight", "O", 8, 1),
        ("q.weight", "GL", 4, 1),
        ("v.weight", "GL", 4, 1),
        ("up.weight", "scales", 1, 6),
    ]
    stream = found["table.weight"]
    assert stream.writers == ["table.weight", "o.weight", "o.bias", "down.weight", "down.bias"]
    assert stream.readers == ["q.weight", "k.weight", "v.weight", "up.weight",
                              "gated.weight", "head.weight"]  # fmt: skip
    assert stream.gains == ("norm.weight", "last.weight")
    assert found.dimension == 8 * 7 // 2 + 16 + 16 + 6
    # both query heads turn with the key that they share
    assert [(part.parameter, part.dual) for part in found["q.weight"].slices] == [
        ("q.weight", False), ("q.weight", False), ("q.bias", False), ("q.bias", False),
        ("k.weight", True), ("k.bias", True),
    ]  # fmt: skip
    assert max(in_turn(model, ((words,), {}), found).values()) < 1e-12


def test_rigid_spaces_say_why() -> None:
    found = ps.spaces(Llama(), torch.randint(11, (2, 5)))
    reasons = {space.name: space.reason for space in found.rigid}
    assert reasons["gated.weight"].startswith("aten.silu: it acts on each feature alone")
    assert all(reasons.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_elements_change_no_output(name: str) -> None:
    _check(f"{name} eval")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO))
def test_random_elements_change_no_output_of_the_zoo(name: str) -> None:
    _check(name)


def _check(name: str) -> None:
    entry, mode = ZOO[name]
    torch.manual_seed(0)
    model, args, kwargs = entry.make(mode, small=True)
    found = ps.spaces(model, *args, kwargs=kwargs)
    if not found.free or sum(p.numel() for p in model.parameters()) > 4_000_000:
        pytest.skip("no space is free, or the model is large")
    try:
        moved = in_turn(model, (args, kwargs), found)
    except RuntimeError as error:
        pytest.skip(f"the model does not run in float64: {error}")
    moved = {space: change for space, change in moved.items() if change == change}
    assert {space: change for space, change in moved.items() if change > TOLERANCE} == {}


@pytest.mark.parametrize("seed", [*range(12), 57, 121, 137])
def test_random_compositions(seed: int) -> None:
    plan = planned(seed)
    model, x = built(plan), inputs(plan)
    found = ps.spaces(model, x)
    before = outputs(model, ((x,), {}))
    for space in found.free:
        twin = ps.rotate_(built(plan), found, {space.name: "random"})
        assert distance(before, outputs(twin, ((x,), {}))) < 1e-7


def two(between: Callable[[Tensor], Tensor], size: int = 6) -> nn.Module:
    """A function between two linear maps."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, size), nn.Linear(size, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(between(self.a(x)))

    return Net()


CONSTANT = torch.tensor([1.0, 1, 2, 2, 2, 3])
CORNER = torch.ones(4, 6)
# function of 4 tokens of 6 features -> (group, size, count) of every free space
BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], list[tuple[str, int, int]]]] = {
    "nothing": (lambda x: x, [("GL", 6, 1)]),
    "a number": (lambda x: 3 * x / 2, [("GL", 6, 1)]),
    "ReLU": (F.relu, []),
    "GELU": (F.gelu, []),
    "a constant": (lambda x: x + 1, []),
    "other factors": (lambda x: x * CONSTANT, [("GL", 2, 1), ("GL", 3, 1), ("scales", 1, 1)]),
    # (what a mask leaves out can be mixed, too)
    "a mask": (lambda x: x * (CONSTANT > 1), [("GL", 2, 1), ("GL", 2, 1), ("GL", 4, 1)]),
    "a length": (lambda x: x / x.norm(dim=-1, keepdim=True), [("O", 6, 1)]),
    "a length by hand": (lambda x: x * x.square().mean(-1, True).rsqrt(), [("O", 6, 1)]),
    "another length": (lambda x: x / x.norm(1, dim=-1, keepdim=True), []),
    "groups": (lambda x: F.rms_norm(x.unflatten(-1, (2, 3)), (3,)).flatten(-2), [("O", 3, 2)]),
    "a layer norm": (lambda x: F.layer_norm(x, (6,)), [("O1", 6, 1)]),
    "its own mean": (lambda x: x - x.mean(-1, keepdim=True), []),
    "other tokens": (lambda x: x + x.flip(0).cumsum(0).detach(), []),
    "the mean of tokens": (lambda x: x + x.mean(0), [("GL", 6, 1)]),
    "halves": (lambda x: torch.cat([x[..., 3:], x[..., :3]], -1), []),
    "a half-turn": (lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1), [("complex", 6, 1)]),
    "a turn": (
        lambda x: x * CONSTANT[[0, 2, 5, 0, 2, 5]]
        + torch.cat([-x[..., 3:], x[..., :3]], -1) * CONSTANT[[5, 0, 2, 5, 0, 2]],
        [("complex", 2, 3)],
    ),
    "two tokens in one": (
        lambda x: torch.cat([x[:, :3], x.flip(0)[:, 3:]], -1), [("GL", 3, 2)],
    ),
    "some features twice": (
        lambda x: x + F.pad(x[:, :2], (0, 4)), [("GL", 2, 1), ("GL", 4, 1)],
    ),
    "a triangle": (lambda x: x.tril() + x, []),
    "a choice": (lambda x: torch.where(x[:, :1] > 0, x, 0), [("GL", 5, 1)]),
    "a known choice": (lambda x: torch.where(CONSTANT > 1, x, 0),
                       [("GL", 2, 1), ("GL", 2, 1), ("GL", 4, 1)]),
    "a softmax": (lambda x: x.softmax(-1), []),
    "its largest": (lambda x: x + x.amax(-1, keepdim=True), []),
    "a product": (lambda x: x * x.flip(-1), []),
    "tokens shifted by a feature": (lambda x: x.flatten().roll(1).view(4, 6), [("scales", 1, 6)]),
    "copies cut in another place": (
        lambda x: torch.cat([x, x.roll(1, 0)], -1)[:, 4:10], [("scales", 1, 6)],
    ),
    # (two features are left out, here and in the lines on zeros, and can be mixed)
    "a diagonal": (
        lambda x: torch.einsum("bii->bi", x.view(1, 4, 6)[:, :, :4])[0] @ CORNER.to(x),
        [("GL", 2, 1)],
    ),
    "an eps beside features": (
        lambda x: x / (x + 1e-5).square().sum(-1, keepdim=True).sqrt(), [],
    ),
    "hypotenuses": (lambda x: F.layer_norm(torch.hypot(x, CONSTANT[:1]), (6,)), []),
    "distances": (lambda x: F.pad(torch.cdist(x, x), (0, 2)), []),
    "zeros with a mean": (
        lambda x: F.layer_norm(F.pad(x[:, :4], (1, 1)), (6,)), [("GL", 2, 1)],
    ),
    "zeros and a number": (lambda x: F.pad(x[:, :4], (1, 1)) + CONSTANT[:1], [("GL", 2, 1)]),
    "three factors": (lambda x: torch.einsum("ti,tj,tj->ti", x, x, x), []),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between_two_maps(name: str) -> None:
    between, expected = BETWEEN[name]
    model, x = two(between).double(), torch.randn(4, 3, dtype=torch.float64)
    found = ps.spaces(model, x)
    assert sorted((space.group, space.size, space.count) for space in found.free) == expected
    assert max(in_turn(model, ((x,), {}), found).values(), default=0) < 1e-9


def test_what_no_operation_uses_is_fixed() -> None:
    """Matrices of a table that the example does not select could change places."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.table[0] @ x

    assert ps.spaces(Net(), torch.randn(3)).free == []


def test_a_model_without_values_has_the_same_spaces() -> None:
    words = torch.randint(11, (2, 5))
    with torch.device("meta"):
        empty = Llama()
    assert labels(ps.spaces(empty, words)) == labels(ps.spaces(Llama(), words))


class TwoStreams(nn.Module):
    """One norm, and its gain, in two streams."""

    def __init__(self, use: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.c, self.norm, self.use = nn.Linear(3, 6), nn.Linear(3, 6), nn.RMSNorm(6), use
        self.b, self.d = nn.Linear(6, 2), nn.Linear(6, 2)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.a(x), self.c(x))


SHARED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "one norm in two streams": lambda m, x, y: m.b(m.norm(x)) + m.d(m.norm(y)),
    "a part of the gain": lambda m, x, y: (
        m.b(m.norm(x)) + m.d(F.pad(F.rms_norm(y[:, :5], (5,)) * m.norm.weight[1:], (0, 1)))
    ),
    "one gain as a number": lambda m, x, y: m.b(m.norm(x)) + m.d(y * m.norm.weight[0]),
    "a gain as a bias": lambda m, x, y: m.b(m.norm(x)) + m.d(y + m.norm.weight),
    "a gain that is measured": lambda m, x, y: m.b(m.norm(x)) / m.norm.weight.norm(),
    "a row as a gain": lambda m, x, y: m.b(x) + m.d(y * m.b.weight[0]),
    "a weight as a number": lambda m, x, y: m.b(x) + m.d(y * m.b.weight[0, 0]),
}


@pytest.mark.parametrize("name", SHARED)
def test_gains_with_several_uses(name: str) -> None:
    model, x = TwoStreams(SHARED[name]).double(), torch.randn(4, 3, dtype=torch.float64)
    found = ps.spaces(model, x)
    assert max(in_turn(model, ((x,), {}), found).values(), default=0) < 1e-9


def test_a_gain_that_has_another_use_is_not_folded() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.g = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.rms_norm(self.a(x), (4,)) * self.g) + self.g.sin().sum()

    found = ps.spaces(Net(), torch.randn(5, 3))
    assert found.free == []
    assert any("its gain has other uses" in space.reason for space in found.rigid)
