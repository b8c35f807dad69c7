"""Models in one order of channels: what is matched, what is compared, and on what."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathspace as ps


class Beside(nn.Module):
    """Channels beside what has none: an input, the states of gated layers in two
    directions, codes of numbers.
    """

    def __init__(self, beside):
        super().__init__()
        self.beside = beside
        self.wide, self.rnn, self.codes = (
            nn.Linear(5, 8),
            nn.LSTM(5, 3, bidirectional=True),
            nn.Linear(5, 6),
        )
        self.head = nn.Linear({"input": 13, "states": 6, "codes": 6}[beside], 3)

    def forward(self, x):
        if self.beside == "states":
            return self.head(self.rnn(x)[0])
        if self.beside == "codes":
            return self.head(self.codes(nn.functional.one_hot(x.argmax(-1), 5).to(x)).relu())
        return self.head(torch.cat([self.wide(x).relu(), x], -1))


@pytest.mark.parametrize(
    ("beside", "weight", "count"),
    [("input", "head", 1), ("states", "head", 0), ("codes", "codes", 1)],
)
def test_what_reads_no_channels_keeps_its_order(beside, weight, count):
    one, x = Beside(beside).double(), torch.randn(7, 5).double()
    groups = ps.channels(one, x)
    assert len(groups.groups) == count
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.get_parameter(f"{weight}.weight")[:, -5:] = one.get_parameter(f"{weight}.weight")[
            :, -5:
        ].roll(1, 1)
    assert not ps.compare(one, other, ps.trace(one, x)).same
    assert groups.match(copy.deepcopy(one)).after == 0
    moved = groups.permute({group.name: torch.randperm(len(group)) for group in groups})
    assert ps.compare(one, moved, ps.trace(one, x)).same


class Tied(nn.Module):
    """A weight that is read in both directions, and a layer that is called by keyword."""

    def __init__(self, size):
        super().__init__()
        self.code, self.head = nn.Linear(size, 8), nn.Linear(size, 2)

    def forward(self, x):
        return self.head(input=torch.relu(self.code(x)) @ self.code.weight)


def test_activations_that_cannot_be_observed_are_one_sentence():
    for size in (5, 8):
        groups = ps.channels(Tied(size), torch.randn(40, size))
        with pytest.raises(ps.UnsupportedError, match="use by='weights'"):
            groups.match(Tied(size), by="activations")


class Mixed(nn.Module):
    """What is neither weight nor channel: an order, a mask, a factor, complex weights."""

    def __init__(self):
        super().__init__()
        self.wide, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("order", torch.arange(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))
        self.factor = nn.Parameter(torch.tensor(2), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        hidden = torch.relu(self.norm(self.wide(x))[:, self.order] * self.mask + x[:, :1])
        return (self.head(hidden).to(torch.complex64) @ self.turn).abs() * self.factor


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("order", torch.tensor([3, 2, 1, 0])),
        ("mask", torch.tensor([True, True, True, True])),
        ("factor", torch.tensor(3)),
        ("turn", 1j * torch.ones(2, 3)),
    ],
)
def test_models_that_differ_in_integers_masks_or_complex_numbers_are_not_the_same(
    name, value, recwarn
):
    one, x = Mixed().eval(), torch.randn(6, 3)
    other, graph = copy.deepcopy(one), ps.trace(one, x)
    # (how many batches a norm has seen is no part of the function)
    other.norm.num_batches_tracked += 5
    assert ps.compare(one, other, graph).same
    dict(other.named_buffers(), **dict(other.named_parameters()))[name].data.copy_(value)
    assert (one(x) - other(x)).abs().max() > 1e-2
    found = ps.compare(one, other, graph)
    assert not found.same and set(found.differ) == {name}
    assert not [w for w in recwarn if "discards" in str(w.message)]


class Shuffled(nn.Module):
    """A cut of some sets of channels changes which channels meet in the shuffle."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(4, 2, 1),
        )

    def forward(self, x):
        return self.third(torch.relu(self.second(F.channel_shuffle(torch.relu(self.first(x)), 2))))


def test_rectifiers_that_are_off_on_the_example_hide_nothing():
    model, x = Shuffled(), torch.randn(2, 3, 4, 4)
    model.second.bias.data.fill_(-2.0)
    groups = ps.channels(model, x)
    with pytest.raises(ps.UnsupportedError, match="differ by"):
        groups.remove(keep={"first.weight": [0, 1, 2, 3]})
    kept = {"first.weight": [0, 3, 4, 7]}
    torch.testing.assert_close(
        groups.remove(keep=kept)(100 * x), groups.masked(keep=kept)(100 * x), rtol=1e-4, atol=1e-4
    )


class Reads(nn.Module):
    """A layer behind a convolution, behind a maximum over all samples, and before
    its input is overwritten.
    """

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        image = kind == "image"
        self.first = nn.Conv2d(2, 4, 3, padding=1) if image else nn.Linear(3, 4)
        self.second = nn.Conv2d(4, 2, 3) if image else nn.Linear(4, 2)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        result = self.second(hidden.amax(0) if self.kind == "maximum" else hidden)
        hidden.zero_()
        return result


@pytest.mark.parametrize(
    ("kind", "shape"), [("image", (2, 16, 16)), ("image", (5, 2, 16, 16)), ("plain", (40, 3))]
)
def test_layers_are_observed_as_they_are_called(kind, shape):
    model, x = Reads(kind).double(), torch.randn(shape).double()
    groups = ps.channels(model, x)
    shuffled = groups.permute({"first.weight": [2, 0, 3, 1]})
    assert groups.match(shuffled, by="activations").after == 0


def test_one_sample_correlates_with_nothing():
    model, x = Reads("maximum"), torch.randn(9, 3)
    with pytest.raises(
        ps.InputError, match=r"one sample of what 'second.weight' reads.*; pass more inputs"
    ):
        ps.channels(model, x).match(copy.deepcopy(model), by="activations")
