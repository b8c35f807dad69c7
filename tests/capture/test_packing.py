"""Packed sequences have the units of padded ones, for sequences of any lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from rescaled import change
from slow_names import slow_names
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import pathspace as ps

pytestmark = pytest.mark.usefixtures("no_rule_fails")
LENGTHS = torch.tensor([3, 6, 2])
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "both ways": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "bidirectional": True}),
    "steps first": (nn.RNN, {"nonlinearity": "relu", "batch_first": False}),
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "projected": (nn.LSTM, {"hidden_size": 7, "proj_size": 4}),
    "gru": (nn.GRU, {}),
}


class Reader(nn.Module):
    """Linear, a recurrent layer on packed or padded sequences, what is read of it, linear."""

    def __init__(self, kind: str, read: str = "last", padding: float = 0.0) -> None:
        super().__init__()
        make, options = KINDS[kind]
        self.enter = nn.Linear(3, 5)
        options = {"input_size": 5, "hidden_size": 4, "batch_first": True} | options
        self.layer: Any = make(**options)
        self.leave = nn.Linear(8 if self.layer.bidirectional else 4, 2)
        self.read, self.padding, self.packs = read, padding, True

    def forward(self, x: Tensor, lengths: Any) -> Tensor:
        first = self.layer.batch_first
        x = torch.relu(self.enter(x))
        x = x if first else x.transpose(0, 1)
        if self.packs:
            x = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        y, state = self.layer(x)
        if self.read == "last":
            state = state[0] if isinstance(state, tuple) else state
            count = 2 if self.layer.bidirectional else 1
            return self.leave(torch.cat([*state[-count:]], -1))
        if self.packs:
            y, lengths = pad_packed_sequence(
                y, batch_first=True, padding_value=self.padding, total_length=8
            )
        else:
            y = nn.functional.pad(y if first else y.transpose(0, 1), (0, 0, 0, 2))
        if self.read == "gathered":
            return self.leave(y[torch.arange(len(y)), lengths - 1])
        if self.read == "largest":
            return self.leave(y.amax(1))
        return self.leave(y)


def sample(model: nn.Module) -> tuple[nn.Module, Tensor]:
    return model.double(), torch.randn(3, 6, 3, dtype=torch.float64)


def stays(model: nn.Module, graph: Any, *given: Any) -> bool:
    """Whether random scales leave what a model computes from given inputs."""
    return change(model, graph, given) < 1e-9


@pytest.mark.parametrize("read", ["last", "gathered", "all"])
@pytest.mark.parametrize(
    "kind", slow_names(KINDS, ["both ways", "steps first", "lstm", "projected"])
)
def test_units_are_those_of_padded_sequences_and_hold_for_all_lengths(kind: str, read: str) -> None:
    model, x = sample(Reader(kind, read))
    graph = ps.trace(model, x, LENGTHS)
    for lengths in (LENGTHS, LENGTHS.tolist(), torch.tensor([6, 6, 6]), torch.tensor([1, 2, 6])):
        assert stays(model, graph, x, lengths)
    assert stays(model, graph, torch.randn(2, 9, 3, dtype=torch.float64), torch.tensor([2, 8]))
    model.packs = False
    if read == "gathered":
        model.read = "all"
    padded = ps.trace(model, x, LENGTHS)
    assert graph.num_units == padded.num_units > 0 and not graph.pinned
    assert graph.num_weights == padded.num_weights


@pytest.mark.parametrize(("padding", "free"), [(0.0, 9), (-float("inf"), 9), (1.0, 5)])
def test_what_fills_shorter_sequences_shares_their_scale(padding: float, free: int) -> None:
    model, x = sample(Reader("relu", "largest", padding))
    graph = ps.trace(model, x, LENGTHS)
    assert graph.num_units == free and stays(model, graph, x, LENGTHS)


def reader(forward: Callable[..., Tensor]) -> nn.Module:
    layer = nn.RNN(3, 4, nonlinearity="relu")
    return network(forward, layer=layer, leave=nn.Linear(4, 2)).double()


def test_packed_inputs_may_have_any_lengths() -> None:
    model = reader(lambda net, packed: net.leave(net.layer(packed)[0].data))
    packed = pack_sequence(
        [torch.randn(n, 3, dtype=torch.float64) for n in (2, 5, 3)], enforce_sorted=False
    )
    graph = ps.trace(model, packed)
    # (a packed sequence is a tuple itself)
    assert graph.num_units == 4 and change(model, graph, (packed,)) < 1e-9
    assert ps.verify(model, packed).holds
