"""Degenerate directions by cause: counts known by hand, and the same for rescaled models."""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from cases import mlp, network
from torch import nn
from zoo.causes import DATA, PAGE, look, render
from zoo.entry import load
from zoo.sequences import Decoder

import pathspace as ps
from pathspace.diagnostics import degeneracy


def attention(width: int, heads: int, bias: bool) -> nn.Module:
    """Softmax attention with maps of its own."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (heads, -1)).transpose(1, 2) for f in (net.q, net.k, net.v))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return net.o(mixed.transpose(1, 2).flatten(2))

    q, k, v, o = (nn.Linear(width, width, bias=bias) for _ in range(4))
    return network(forward, q=q, k=k, v=v, o=o)


def causes(model: nn.Module, x: torch.Tensor) -> tuple[dict[str, int], Any]:
    found = degeneracy(model, x)
    counts: Counter[str] = Counter()
    for each in found.symmetries:
        counts[each.cause] += each.directions
    assert found.deficit == found.dead + found.gauge + found.symmetric
    assert sum(counts.values()) == found.symmetric and found.clear
    assert found.unexplained == found.undetermined == 0
    return dict(counts), found


@pytest.mark.parametrize(("sizes", "seed"), [((5, 3, 6), 0), ((4, 2, 3), 1), ((6, 4, 5), 2)])
def test_adjacent_linear_maps(sizes: tuple[int, int, int], seed: int) -> None:
    torch.manual_seed(seed)
    a, b, c = sizes
    model = nn.Sequential(nn.Linear(a, b), nn.Linear(b, c), nn.Tanh(), nn.Linear(c, 2))
    x = 2 * torch.randn(300, a)
    counts, found = causes(model, x)
    # GL(b) and a shift; its diagonal is the rescaling of units
    assert counts == {"shift": b, "linear map": b * b - b} and found.gauge == b
    ps.rescale_(model, ps.trace(model, x), torch.randn(b).double())
    assert causes(model, 2 * torch.randn(300, a))[0] == counts


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_weights_with_norms_have_the_causes_of_plain_ones(wrap: Any) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    normed, x = copy.deepcopy(plain), 2 * torch.randn(300, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrap(normed[0]), wrap(normed[1])
    (want, known), (counts, found) = causes(plain, x), causes(normed, x)
    # a length for each of 8 rows, which nothing depends on
    assert found.deficit == known.deficit + 8 and known.gauge == 3
    assert sum(counts.values()) + found.gauge == sum(want.values()) + known.gauge + 8
    assert counts["linear map"] >= want["linear map"] == 6 and counts["shift"] == want["shift"] == 3


def test_a_wide_layer_between_narrow_ones_has_directions_that_nobody_reads() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    counts, found = causes(model, torch.randn(100, 3))
    # the composite map has 2 * 3 + 2 parameters what nobody reads, the kernel of the second map for
    # each input, and what nobody writes: 3 * 3 and 2 * 2
    assert found.rank == 8 and (counts["shift"], counts["kernel"], found.gauge) == (5, 9 + 4, 5)
    assert counts["linear map"] == 20 + 12 - 8 - 5 - 13 - found.gauge


def test_what_norms_and_softmax_subtract() -> None:
    x = 2 * torch.randn(300, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
    assert causes(model, x)[0] == {"shift": 1, "translation": 4}
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.LogSoftmax(-1))
    assert causes(model, x)[0] == {"shift": 1, "translation": 5}
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), *mlp(5, 4, 2, act=nn.Tanh))
    nn.init.uniform_(model[1].weight, 0.5, 2)
    counts, _ = causes(model, x)
    # and what lies between turns, but for the direction of ones: the
    # antisymmetric matrices of size 4
    assert (counts["translation"], counts["normal"], counts["rotation"]) == (4, 4, 6)
    model = nn.Sequential(nn.Linear(4, 3), nn.RMSNorm(3), *mlp(3, 4, 2, act=nn.Tanh))
    assert causes(model, x)[0]["rotation"] == 3
    # frozen or not, a batch norm's weights do what the rows of the map before it do
    for mode in (True, False):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
        counts, found = causes(model.train(mode), x)
        assert counts == {"scaling": 5} | ({} if mode else {"shift": 5})
        assert found.dead == (5 if mode else 0)


@pytest.mark.parametrize(("heads", "bias"), [(2, True), (3, False)])
def test_heads_of_attention(heads: int, bias: bool) -> None:
    torch.manual_seed(heads)
    model, width = attention(6, heads, bias), 6 // heads
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    counts, found = causes(model, torch.randn(40, 5, 6))
    # GL of each head between queries and keys, and between values and outputs
    assert counts["linear map"] + found.gauge == 2 * heads * width**2
    assert counts.get("shift", 0) == (6 if bias else 0) and found.dead == (6 if bias else 0)


@pytest.mark.slow
@pytest.mark.parametrize("rotary", [True, False])
def test_a_decoder_has_the_symmetries_of_its_parts(rotary: bool) -> None:
    model = Decoder(dim=4, heads=2, groups=2, depth=1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        if not rotary:
            model.cos.fill_(1), model.sin.fill_(0)
    counts, found = causes(model, torch.randint(0, 23, (30, 7)))
    # 24 gated features, 3 norms against what reads them; values and outputs of 2 heads change
    # basis, queries and keys too, by what commutes with turns of the plane
    rescalings = 24 + 3 * 4
    assert counts["rotation"] == 4 * 3 // 2
    assert counts["linear map"] + found.gauge == rescalings + 2 * 4 + 2 * (2 if rotary else 4)
    graph = ps.trace(model, torch.randint(0, 23, (2, 7)))
    ps.rescale_(model, graph, 0.3 * torch.randn(graph.num_units))
    assert causes(model, torch.randint(0, 23, (30, 7)))[0] == counts


def test_tables_that_are_added_shift_against_each_other() -> None:
    model = network(
        lambda net, x: net.map(net.words(x) + net.places(torch.arange(x.shape[1]))),
        words=nn.Embedding(7, 4), places=nn.Embedding(5, 4),
        map=mlp(4, 5, 3, bias=False, act=nn.Tanh),
    )  # fmt: skip
    counts, _ = causes(model, torch.randint(0, 7, (60, 5)))
    assert counts["shift"] == 4


def test_what_no_cause_is_known_for_is_said_to_be_unexplained() -> None:
    model = network(
        lambda net, x: net.last(torch.tanh(x * net.direction.square().sum())),
        direction=nn.Parameter(torch.randn(4)), last=nn.Linear(3, 2),
    )  # fmt: skip
    found = degeneracy(model, torch.randn(50, 3))
    # all directions across a vector that enters by its length alone
    assert (found.deficit, found.gauge, found.unexplained) == (3, 0, 3)


def test_the_page_on_causes_says_what_is_measured() -> None:
    rows = {row["name"]: row for row in json.loads(DATA.read_text(encoding="utf-8"))}
    assert PAGE.read_text(encoding="utf-8") == render(rows.values())
    measured = [row for row in rows.values() if "error" not in row]
    whole = (row["clear"] and not row["unexplained"] + row["undetermined"] for row in measured)
    assert sum(whole) >= 60
    for name in ("act_norm", "lora", "act_relu6"):
        assert look(load()[name]) == rows[name]


def test_packed_heads_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, norm_first=True)
    counts, _ = causes(layer, torch.randn(50, 5, 4))
    assert counts["linear map"] == 2 * (2 * 2**2 - 4) and counts["normal"] == 12 + 6
