"""Channels: what is left out of a smaller model, against hooks that silence the same
channels in the full one.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from cases import network
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.pruning.channels import ChannelGroups


def conv(a: int, b: int, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, kernel, padding=kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(b)
    )


def residual(net: Any, x: Tensor) -> Tensor:
    """Residual, depthwise, squeeze and excitation."""
    x = F.silu(net.stem(x))
    z = F.hardswish(net.deep(F.silu(net.wide(x))))
    z = z * torch.sigmoid(net.up(F.relu(net.down(z.mean((2, 3), keepdim=True)))))
    return net.head((x + net.back(z)).mean((2, 3)))


def dense(net: Any, x: Tensor) -> Tensor:
    """Concatenation, a grouped convolution, group norm, a flattened map."""
    x = F.relu(net.a(x))
    x = torch.cat([x, F.gelu(net.b(x))], 1)
    return net.head(F.adaptive_avg_pool2d(net.norm(net.c(x)), 2).flatten(1))


class Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.inner = heads, size // heads, size
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(batch, length, 3, self.num_heads, self.head_dim)
            .permute(2, 0, 3, 1, 4)
        )
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, length, self.inner))


class Block(nn.Module):
    """A transformer block with a gated feed-forward part."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed, self.place, self.attention = (
            nn.Linear(3, 16),
            nn.Parameter(torch.randn(5, 16)),
            attention,
        )
        self.one, self.two = nn.LayerNorm(16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 24), nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        x = x + self.attention(self.one(x))
        gate, value = self.up(self.two(x)).chunk(2, -1)
        return self.head(x + self.down(F.silu(gate) * value))


class Stubborn(Attention):
    """Its code takes the size of what comes out from what came in."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(x)
            .reshape(*x.shape[:2], 3, self.num_heads, self.head_dim)
            .permute(2, 0, 3, 1, 4)
        )
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Grouped(Attention):
    """Two query heads share a key head; the code counts heads of both kinds."""

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.pairs, self.qkv = 2, nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [heads * self.head_dim for heads in (self.num_heads, self.pairs, self.pairs)]
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in self.qkv(x).split(sizes, -1)
        )
        k, v = (t.repeat_interleave(self.num_heads // self.pairs, 1) for t in (k, v))
        return self.proj(
            F.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .reshape(*x.shape[:2], self.inner)
        )


class Tables(nn.Module):
    """Matrices of heads and of experts in tables."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(4, 6, 5) / 3) for _ in range(3))
        self.o, self.last = nn.Parameter(torch.randn(4, 5, 6) / 3), nn.Linear(6, 2)
        self.up, self.down = (
            nn.Parameter(torch.randn(3, 6, 16) / 3),
            nn.Parameter(torch.randn(3, 8, 6) / 3),
        )
        self.into, self.router = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        q, k, v = (torch.einsum("bti,hid->bhtd", x, table) for table in (self.q, self.k, self.v))
        x = x + torch.einsum("bhtd,hdi->bti", (q @ k.transpose(-1, -2)).softmax(-1) @ v, self.o)
        gate, value = torch.einsum("bti,eio->beto", x, self.up).chunk(2, -1)
        each = torch.einsum("beto,eoi->beti", F.silu(gate) * value, self.down)
        return self.last((self.router(x).softmax(-1).transpose(1, 2)[..., None] * each).sum(1))


def shuffled(net: Any, x: Tensor) -> Tensor:
    """Halves that take different ways and are shuffled."""
    left, right = net.a(x).chunk(2, 1)
    x = torch.cat([left, torch.relu(net.b(right))], 1)
    return net.head(torch.relu(x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)))


IMAGE, TOKENS = torch.randn(2, 3, 6, 6), torch.randn(2, 5, 3)
MODELS = {
    "residual": (
        lambda: network(
            residual, stem=conv(3, 8), wide=conv(8, 16, 1), deep=conv(16, 16, 3, groups=16),
            down=nn.Conv2d(16, 4, 1), up=nn.Conv2d(4, 16, 1), back=conv(16, 8, 1),
            head=nn.Linear(8, 3),
        ),
        IMAGE,
    ),
    "dense": (
        lambda: network(
            dense, a=conv(3, 8), b=conv(8, 8), c=conv(16, 16, 3, groups=4),
            norm=nn.GroupNorm(4, 16), head=nn.Linear(16 * 4, 3),
        ),
        IMAGE,
    ),
    "block": (lambda: Block(Attention(16, 4)), TOKENS),
    "grouped": (lambda: Block(Grouped()), TOKENS),
    "shuffled": (
        lambda: network(shuffled, a=nn.Conv2d(3, 8, 1), b=conv(4, 4), head=nn.Conv2d(8, 2, 1)),
        IMAGE,
    ),
    "stubborn": (lambda: Block(Stubborn(16, 4)), TOKENS),
    "plain": (
        lambda: nn.Sequential(
            nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.PReLU(5), nn.Linear(5, 2)
        ),
        TOKENS[0],
    ),
}  # fmt: skip


def build(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    make, x = MODELS[name]
    torch.manual_seed(seed)
    model = make().double().eval()
    for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
        if tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5)
    return model, x.double()


def silenced(model: nn.Module, groups: ChannelGroups, kept: dict[str, Tensor], x: Tensor) -> Tensor:
    """The oracle: channels are zero where a layer reads them, by hooks on the model as it is."""
    hooks = []
    for name, numbers in kept.items():
        group = groups[name]
        gone = [c for c in range(len(group)) if c not in numbers.tolist()]
        for tensor, dim in group.readers:
            layer, where = (
                model.get_submodule(tensor.rpartition(".")[0]),
                group.slices[tensor, dim][gone].reshape(-1),
            )
            last = isinstance(layer, nn.Linear)

            def hook(
                module: nn.Module, args: tuple[Tensor], where: Tensor = where, last: bool = last
            ) -> tuple[Tensor]:
                return (args[0].index_fill(-1 if last else 1, where, 0),)

            hooks.append(layer.register_forward_pre_hook(hook))
    with torch.no_grad():
        out = model(x)
    for handle in hooks:
        handle.remove()
    return out


@pytest.mark.parametrize("name", MODELS)
def test_a_smaller_model_computes_what_hooks_leave(name):
    model, x = build(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    groups = ps.channels(model, x)
    assert groups.removable
    for keep in (
        0.5,
        {group.name: torch.arange(len(group)) % 2 == 1 for group in groups.removable},
    ):
        small, kept = groups.remove(keep=keep), groups.kept(keep)
        assert sum(p.numel() for p in small.parameters()) < 0.9 * sum(
            p.numel() for p in model.parameters()
        )
        expected = silenced(model, groups, kept, x)
        torch.testing.assert_close(small(x), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(groups.masked(keep=keep)(x), expected, rtol=1e-10, atol=1e-10)
        assert not torch.allclose(expected, model(x))
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_channels_of_known_layers():
    def sizes(name):
        return {group.name: (len(group), len(group.slices)) for group in ps.channels(*build(name))}

    assert sizes("residual") == {
        "stem.0.weight": (8, 12),
        "wide.0.weight": (16, 14),
        "down.weight": (4, 3),
    }
    assert sizes("block") == {
        "embed.weight": (16, 14),
        "attention.qkv.weight": (4, 3),
        "up.weight": (12, 3),
    }
    heads = ps.channels(*build("block"))["attention.qkv.weight"]
    assert heads.slices["attention.qkv.bias", 0][1].tolist() == [
        i + 4 for p in (0, 16, 32) for i in range(p, p + 4)
    ]
    # a channel of a grouped convolution is a whole group: four channels, each read in four
    # places of a flattened map
    dense = ps.channels(*build("dense"))
    assert [len(group) for group in dense] == [2, 2]
    assert dense["a.0.weight"].slices["head.weight", 1].shape == (2, 16)


def test_sizes_in_modules_follow():
    model, x = build("grouped")
    small = ps.channels(model, x).remove(keep={"attention.qkv.weight": [1]})
    assert (small.attention.num_heads, small.attention.pairs, small.attention.head_dim) == (2, 1, 4)
    model, x = build("block")
    small = ps.channels(model, x).remove(keep={"attention.qkv.weight": [1]})
    assert (small.attention.num_heads, small.attention.inner, small.attention.head_dim) == (1, 4, 4)
    assert small.attention.proj.in_features == 4 and model.attention.num_heads == 4
    model, x = build("dense")
    small = ps.channels(model, x).remove(keep=0.5)
    assert small.c[0].groups == 2 and small.norm.num_groups == 2 and small.b[0].in_channels == 4


def behind_split(net: Any, x: Tensor) -> Tensor:
    """Two layers of one kind behind a split whose sizes are numbers in the code."""
    p, q = F.relu(net.a(x)).split([3, 6], 1)
    return net.out(F.relu(torch.cat([net.b(p), net.c(q)], 1)))


def test_a_layer_is_not_refused_for_what_is_wrong_with_another():
    layers = {"a": nn.Linear(4, 9), "b": nn.Linear(3, 4), "c": nn.Linear(6, 4)}
    model = network(behind_split, **layers, out=nn.Linear(8, 2)).double().eval()
    x = torch.randn(5, 4).double()
    groups = ps.channels(model, x)
    # (the parts of a split are groups of their own)
    assert {name.split()[0] for name in groups.refused} == {"a.weight"}
    small = groups.remove(keep={"b.weight": [1, 3]})
    assert small.b.weight.shape[0] == 2
    # nothing reads what the other rows give
    silent = copy.deepcopy(model)
    with torch.no_grad():
        silent.out.weight[:, [row for row in range(len(model.b.weight)) if row not in (1, 3)]] = 0
    torch.testing.assert_close(small(x), silent(x))


def test_what_stays_is_refused_with_a_reason():
    model, x = build("stubborn")
    groups = ps.channels(model, x)
    assert set(groups.refused) == {"embed.weight", "attention.qkv.weight"}
    assert (
        "layer_norm" in groups.refused["embed.weight"]
        and "number that cannot be adjusted" in groups.refused["attention.qkv.weight"]
    )
    with pytest.raises(ps.UnsupportedError, match="cannot be removed"):
        groups.remove(keep={"attention.qkv.weight": 0.5})
    for keep in (
        {"nothing": 0.5},
        {"up.weight": 0.0},
        {"up.weight": []},
        {"up.weight": [12]},
        {"up.weight": [True]},
    ):
        with pytest.raises(ps.InputError):
            groups.remove(keep=keep)


def test_tables_of_heads_and_of_experts():
    model, x = Tables().double(), TOKENS.double()
    groups = ps.channels(model, x)
    assert {group.name: len(group) for group in groups} == {"q": 4, "up": 8, "into.weight": 6}
    small = groups.remove(keep={"q": [0, 3], "up": [1, 2, 5]})
    assert (
        small.q.shape == (2, 6, 5) and small.up.shape == (3, 6, 6) and small.down.shape == (3, 3, 6)
    )
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        by_hand.o[[1, 2]] = 0
        by_hand.down[:, [0, 3, 4, 6, 7]] = 0
    torch.testing.assert_close(small(x), by_hand(x), rtol=1e-10, atol=1e-10)
    assert groups.match(groups.permute(redone(groups))).after == 0


def test_states_of_a_recurrent_layer_of_torch():
    rnn = nn.RNN(3, 6, nonlinearity="relu", batch_first=True)
    model = network(lambda net, x: net.out(net.rnn(x)[0]), rnn=rnn, out=nn.Linear(6, 2)).double()
    x = TOKENS.double()
    small = ps.channels(model, x).remove(keep={"rnn.weight_ih_l0": [0, 2, 5]})
    assert small.rnn.hidden_size == 3
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        by_hand.rnn.weight_hh_l0[:, [1, 3, 4]] = by_hand.out.weight[:, [1, 3, 4]] = 0
    torch.testing.assert_close(small(x), by_hand(x), rtol=1e-10, atol=1e-10)


def test_a_model_of_which_nothing_can_be_left_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with pytest.raises(
        ps.UnsupportedError, match=r"No channel of Sequential can be removed \(.*layer_norm"
    ):
        ps.channels(model, torch.randn(2, 3)).remove(keep=0.5)
    with pytest.raises(ps.UnsupportedError, match="nothing in it is a channel"):
        ps.channels(nn.Sequential(nn.Linear(3, 2)), torch.randn(2, 3)).remove(keep=0.5)


def test_importance():
    model, x = build("plain")
    groups = ps.channels(model, x)
    name = groups[1].name
    by_hand = (
        model[2].weight.square().sum(1)
        + model[2].bias ** 2
        + model[3].weight ** 2
        + model[4].weight.square().sum(0)
    )
    torch.testing.assert_close(groups.importance()[name], by_hand.sqrt().detach())
    with pytest.raises(ps.InputError, match="backward"):
        groups.importance("gradients")
    model(x).square().sum().backward()
    taylor = (model[4].weight * model[4].weight.grad).sum(0).abs().detach()
    torch.testing.assert_close(groups.importance("gradients")[name], taylor)
    with pytest.raises(ps.InputError, match="expected one of"):
        groups.importance("luck")


# (name -> layers between two linear maps of six channels)
BETWEEN = {
    "plain": lambda: [nn.ReLU()],
    "batch norm": lambda: [nn.BatchNorm1d(6), nn.ReLU()],
    "no parameters": lambda: [nn.BatchNorm1d(6, affine=False), nn.ReLU()],
    "statistics of the batch": lambda: [nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU()],
    "layer norm": lambda: [nn.ReLU(), nn.LayerNorm(6, eps=0.0)],
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_rescaled_model_keeps_the_same_channels_by_paths(name):
    model = nn.Sequential(
        nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 6), *BETWEEN[name](), nn.Linear(6, 2)
    ).double()
    x = torch.randn(5, 4).double()
    model(x)
    graph, before = ps.trace(model.eval(), x), ps.channels(model, x).importance("paths")
    assert before and all(scores.std() > 0 for scores in before.values())
    ps.rescale_(model, graph, torch.randn(graph.num_units).double())
    for name, scores in ps.channels(model, x).importance("paths").items():
        torch.testing.assert_close(scores, before[name])


@settings(deadline=None, max_examples=10)
@given(
    widths=st.lists(st.integers(2, 6), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    share=st.floats(0.2, 0.9),
)
def test_any_chain(widths, seed, share):
    torch.manual_seed(seed)
    sizes, layers = [3, *widths, 2], []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.GELU()]
    model, x = nn.Sequential(*layers).double(), torch.randn(4, 3).double()
    groups = ps.channels(model, x)
    assert [len(group) for group in groups] == widths
    expected = silenced(model, groups, groups.kept(share), x)
    torch.testing.assert_close(groups.remove(keep=share)(x), expected)


# --- order


def redone(groups: ChannelGroups, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {group.name: torch.randperm(len(group), generator=generator) for group in groups}


@pytest.mark.parametrize("name", MODELS)
def test_another_order_of_channels_is_the_same_function_and_is_found_again(name):
    model, x = build(name)
    groups = ps.channels(model, x)
    orders = redone(groups)
    moved = groups.permute(orders)
    torch.testing.assert_close(moved(x), model(x), rtol=1e-10, atol=1e-10)
    assert any(
        not torch.equal(p, q) for p, q in zip(model.parameters(), moved.parameters(), strict=True)
    )
    found = groups.match(moved)
    assert found.before > 0 and found.after == 0
    for order, back in ((orders[group.name], found.orders[group.name]) for group in groups):
        assert order[back].tolist() == list(range(len(order)))


def test_activations_find_the_order_too():
    model, x = build("residual")
    groups = ps.channels(model, x)
    data = torch.randn(16, 3, 6, 6).double()
    assert groups.match(groups.permute(redone(groups)), by="activations", inputs=data).after == 0


def test_matching_of_other_weights_by_brute_force():
    model, other = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double() for _ in range(2)
    )
    groups = ps.channels(model, torch.randn(2, 3).double())
    every = [groups.match(other).after]
    for order in itertools.permutations(range(4)):
        a, b = other[0], other[2]
        parts = [
            model[0].weight - a.weight[list(order)],
            model[0].bias - a.bias[list(order)],
            model[2].bias - b.bias,
        ]
        parts.append(model[2].weight - b.weight[:, list(order)])
        every.append(float(sum(part.detach().square().sum() for part in parts)) ** 0.5)
    assert every[0] == pytest.approx(min(every), rel=1e-9)


def test_between_two_models():
    (one, x), (two, _) = build("plain"), build("plain", seed=1)
    groups = ps.channels(one, x)
    half = groups.interpolate(groups.match(two), 0.25)
    expected = 0.75 * one[0].weight + 0.25 * groups.match(two).model[0].weight
    torch.testing.assert_close(half[0].weight, expected)
    with pytest.raises(ps.InputError, match="same architecture"):
        groups.match(build("residual")[0])
    with pytest.raises(ps.InputError, match="every number once"):
        groups.permute({"0.weight": [0, 0, 1, 2, 3, 4, 5]})
    with pytest.raises(ps.InputError, match="expected 'weights'"):
        groups.match(two, by="luck")
    assert (
        groups.match(two, by="activations", inputs={"input": x}).after
        == groups.match(two, by="activations").after
    )


def test_what_is_no_share_and_no_mask_is_one_sentence():
    groups = ps.channels(*build("plain"))
    for keep in ("half", [0, 1], *({"0.weight": own} for own in ([0.5, 0.2], torch.ones(7), None))):
        with pytest.raises(ps.InputTypeError, match="expected a share"):
            groups.remove(keep=keep)
    with pytest.raises(ps.InputError, match="no channel group 5"):
        groups[5]


class Alike(nn.Module):
    """A width that has to shrink, and other numbers that are equal by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.width = self.longest = self.classes = self.factor = 8
        self.every = (8, 3)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : self.longest]
        h = F.relu(self.a(x)).reshape(-1, self.width)
        y = self.b(h).reshape(*x.shape[:2], 3)
        return y * self.factor if self.training else y


def test_numbers_of_the_same_value_remain():
    model = Alike()
    groups = ps.channels(model, torch.randn(2, 3, 4))
    small, masked = groups.remove(keep=0.5), groups.masked(keep=0.5)
    assert (small.width, small.longest, small.classes, small.factor) == (4, 8, 8, 8)
    assert small.every == (8, 3)
    x = torch.randn(2, 9, 4)
    torch.testing.assert_close(small(x), masked(x))


STORED = {
    "instance norm": (
        lambda: [nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3)],
        (2, 3, 9, 9),
        {"1.num_features": 4},
    ),
    "cell": (
        lambda: [nn.Linear(4, 6), nn.ReLU(), nn.GRUCell(6, 5), nn.Linear(5, 2)],
        (2, 4),
        {"2.input_size": 3, "2.hidden_size": 5},
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_sizes_that_modules_store_are_updated(name):
    build, shape, sizes = STORED[name]
    small = ps.channels(nn.Sequential(*build()), torch.randn(shape)).remove(keep=0.5)
    assert {where: small.get_submodule(where[0]).__dict__[where[2:]] for where in sizes} == sizes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small.eval()(torch.randn(shape))


def _sizes(model: nn.Sequential) -> int:
    return model[0].out_features


@pytest.mark.parametrize("name", ["remove", "masked"])
def test_what_stays_and_what_goes_have_names(name):
    model = nn.Sequential(nn.Linear(4, 10), nn.GELU(), nn.Linear(10, 2))
    groups = ps.channels(model, torch.randn(4, 4))
    cut = getattr(groups, name)
    # (a number without a name is what the name of the method says)
    assert _sizes(groups.remove(0.1)) == _sizes(groups.remove(remove=0.1)) == 9
    with pytest.raises(ps.InputTypeError, match=r"both keep=0\.5 and remove=0\.5"):
        cut(keep=0.5, remove=0.5)
    for share in (1, 1.5, -0.1, "a tenth", {"0.weight": 0.1}, True):
        with pytest.raises(ps.InputError, match="share of channels from 0 to below 1"):
            cut(share)
    x = torch.randn(3, 4)
    for share in (0.0, 0.1, 0.25, 0.9):
        assert torch.equal(cut(remove=share)(x), cut(keep=1 - share)(x))
    assert torch.equal(cut()(x), cut(keep=0.5)(x))
    assert len(groups.remove(remove=0.1)[0].weight) == 9


def test_what_a_normalisation_hides_tells_no_channels_apart():
    model = (
        nn.Sequential(nn.Linear(4, 6), *BETWEEN["no parameters"](), nn.Linear(6, 2)).double().eval()
    )
    (scores,) = ps.channels(model, torch.randn(5, 4).double()).importance("paths").values()
    # what enters has the same size in all of them, what leaves has no free scale
    entering = scores.square() - model[3].weight.detach().square().sum(0)
    torch.testing.assert_close(entering, entering.mean().expand(6))
