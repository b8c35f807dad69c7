"""Models in one order of channels: what is matched, what is compared, and on what."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import network
from torch import nn
from torch.nn import functional as F

import pathspace as ps

# what has no channels beside what has some: an input, the states of gated layers in two directions
BESIDE = {
    "input": (
        lambda net, x: net.head(torch.cat([net.wide(x).relu(), x], -1)), nn.Linear(5, 8), 13, 1,
    ),
    "states": (lambda net, x: net.head(net.wide(x)[0]), nn.LSTM(5, 3, bidirectional=True), 6, 0),
}  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE)
def test_what_reads_no_channels_keeps_its_order(beside):
    forward, wide, read, count = BESIDE[beside]
    one = network(forward, wide=copy.deepcopy(wide), head=nn.Linear(read, 3)).double()
    x = torch.randn(7, 5).double()
    groups = ps.channels(one, x)
    assert len(groups.groups) == count
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.head.weight[:, -5:] = one.head.weight[:, -5:].roll(1, 1)
    assert not ps.compare(one, other, ps.trace(one, x)).same
    assert groups.match(copy.deepcopy(one)).after == 0
    moved = groups.permute({group.name: torch.randperm(len(group)) for group in groups})
    assert ps.compare(one, moved, ps.trace(one, x)).same


def tied(size):
    """A weight that is read in both directions, and a layer that is called by keyword."""
    return network(
        lambda net, x: net.head(input=torch.relu(net.code(x)) @ net.code.weight),
        code=nn.Linear(size, 8),
        head=nn.Linear(size, 2),
    )


def test_activations_that_cannot_be_observed_are_one_sentence():
    for size in (5, 8):
        groups = ps.channels(tied(size), torch.randn(40, size))
        with pytest.raises(ps.UnsupportedError, match="use by='weights'"):
            groups.match(tied(size), by="activations")


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


def test_rectifiers_that_are_off_on_the_example_hide_nothing():
    """A cut of some sets of channels changes which channels meet in the shuffle."""
    model = network(
        lambda net, x: net.third(
            torch.relu(net.second(F.channel_shuffle(torch.relu(net.first(x)), 2)))
        ),
        first=nn.Conv2d(3, 8, 1),
        second=nn.Conv2d(8, 4, 1),
        third=nn.Conv2d(4, 2, 1),
    )
    model.second.bias.data.fill_(-2.0)
    x = torch.randn(2, 3, 4, 4)
    groups = ps.channels(model, x)
    with pytest.raises(ps.UnsupportedError, match="differ by"):
        groups.remove(keep={"first.weight": [0, 1, 2, 3]})
    kept = {"first.weight": [0, 3, 4, 7]}
    torch.testing.assert_close(
        groups.remove(keep=kept)(100 * x), groups.masked(keep=kept)(100 * x), rtol=1e-4, atol=1e-4
    )


def overwritten(net, x):
    """A layer whose input, perhaps a maximum over all samples, is overwritten after it is read."""
    hidden = torch.relu(net.first(x))
    result = net.second(hidden.amax(0) if net.largest else hidden)
    hidden.zero_()
    return result


def reads(kind):
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    if kind == "image":
        first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3)
    return network(overwritten, first=first, second=second, largest=kind == "maximum")


@pytest.mark.parametrize(
    ("kind", "shape"), [("image", (2, 16, 16)), ("image", (5, 2, 16, 16)), ("plain", (40, 3))]
)
def test_layers_are_observed_as_they_are_called(kind, shape):
    model, x = reads(kind).double(), torch.randn(shape).double()
    groups = ps.channels(model, x)
    shuffled = groups.permute({"first.weight": [2, 0, 3, 1]})
    assert groups.match(shuffled, by="activations").after == 0


def test_one_sample_correlates_with_nothing():
    model, x = reads("maximum"), torch.randn(9, 3)
    with pytest.raises(
        ps.InputError, match=r"one sample of what 'second.weight' reads.*; pass more inputs"
    ):
        ps.channels(model, x).match(copy.deepcopy(model), by="activations")
