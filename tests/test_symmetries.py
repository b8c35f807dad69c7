"""Degenerate directions by cause: counts known by hand, and the same for rescaled models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from pathspace.diagnostics import degeneracy


class Attention(nn.Module):
    """Softmax attention with maps of its own."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


def causes(model: nn.Module, x: torch.Tensor) -> tuple[dict[str, int], Any]:
    found = degeneracy(model, x)
    counts: Counter[str] = Counter()
    for each in found.symmetries:
        counts[each.cause] += each.directions
    assert found.deficit == found.dead + found.gauge + found.symmetric + found.undetermined + found.unexplained
    assert sum(counts.values()) == found.symmetric and found.unexplained == found.undetermined == 0 and found.clear
    return dict(counts), found


@pytest.mark.parametrize(("sizes", "seed"), [((5, 3, 6), 0), ((4, 2, 3), 1), ((6, 4, 5), 2)])
def test_adjacent_linear_maps(sizes: tuple[int, int, int], seed: int) -> None:
    torch.manual_seed(seed)
    a, b, c = sizes
    model = nn.Sequential(nn.Linear(a, b), nn.Linear(b, c), nn.Tanh(), nn.Linear(c, 2))
    counts, found = causes(model, 2 * torch.randn(300, a))
    # GL(b) and a shift; its diagonal is the rescaling of units
    assert counts == {"shift": b, "linear map": b * b - b} and found.gauge == b
    with torch.no_grad():
        factor = torch.exp(torch.randn(b))
        model[0].weight.mul_(factor[:, None]), model[0].bias.mul_(factor), model[1].weight.div_(factor)
    assert causes(model, 2 * torch.randn(300, a))[0] == counts


def test_a_wide_layer_between_narrow_ones_has_directions_that_nobody_reads() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    counts, found = causes(model, torch.randn(100, 3))
    # the composite map has 2 * 3 + 2 parameters
    assert found.rank == 8 and counts["shift"] == 5 and counts["linear map"] == 20 + 12 - 8 - 5 - found.gauge


def test_what_norms_and_softmax_subtract() -> None:
    torch.manual_seed(0)
    x = 2 * torch.randn(300, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
    assert causes(model, x)[0] == {"shift": 1, "translation": 4}
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.LogSoftmax(-1))
    assert causes(model, x)[0] == {"shift": 1, "translation": 5}
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    nn.init.uniform_(model[1].weight, 0.5, 2)
    counts, _ = causes(model, x)
    # and what lies between turns, but for the direction of ones: the antisymmetric matrices of size 4
    assert (counts["translation"], counts["normal"], counts["rotation"]) == (4, 4, 6)
    model = nn.Sequential(nn.Linear(4, 3), nn.RMSNorm(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert causes(model, x)[0]["rotation"] == 3
    # frozen or not, a batch norm's weights do what the rows of the map before it do
    for mode in (True, False):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).train(mode)
        counts, found = causes(model, x)
        assert counts == {"scaling": 5} | ({} if mode else {"shift": 5}) and found.dead == (5 if mode else 0)


@pytest.mark.parametrize(("heads", "bias"), [(2, True), (3, False)])
def test_heads_of_attention(heads: int, bias: bool) -> None:
    torch.manual_seed(heads)
    model, width = Attention(6, heads, bias), 6 // heads
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    counts, found = causes(model, torch.randn(40, 5, 6))
    # GL of each head between queries and keys, and between values and outputs
    assert counts["linear map"] + found.gauge == 2 * heads * width**2
    assert counts.get("shift", 0) == (6 if bias else 0) and found.dead == (6 if bias else 0)


def test_packed_heads_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, norm_first=True)
    counts, _ = causes(layer, torch.randn(50, 5, 4))
    assert counts["linear map"] == 2 * (2 * 2**2 - 4) and counts["normal"] == 12 + 6
