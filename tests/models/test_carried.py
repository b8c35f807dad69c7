"""Models whose state is an input and an output."""

from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.rnn(x, h)
        return self.head(y), h


def gated(net: Any, x: Tensor, state: tuple[Tensor, Tensor]) -> dict[str, object]:
    """A nested state, outputs by name, and a hidden layer beside the recurrence."""
    y, state = net.lstm(x, state)
    return {"y": net.head(torch.relu(net.hidden(y))), "state": state}


X, H = torch.randn(2, 5, 3), torch.zeros(1, 2, 4)


def test_a_state_that_is_carried_has_free_scales() -> None:
    model = Language()
    assert ps.trace(model, X, H).num_units == 0
    carried = ps.Carried(model, {"h": 1})
    assert ps.trace(carried, X, H).num_units == 4
    assert ps.verify(carried, X, H).holds


def test_calls_one_after_the_other_are_the_same_function() -> None:
    model = Language()
    first, h = model(X, H)
    second, _ = model(X, h)
    assert torch.equal(torch.cat([first, second]), torch.cat([y for (y,) in _called(model)]))


def _called(model: nn.Module) -> list[list[Tensor]]:
    return ps.Carried(model, {"h": 1}, calls=2)(X, H)


def test_a_state_may_be_a_nest_and_an_output_may_have_a_name() -> None:
    lstm = nn.LSTM(3, 4, batch_first=True)
    model = network(gated, lstm=lstm, hidden=nn.Linear(4, 5), head=nn.Linear(5, 2))
    model = ps.Carried(model, {"state": "state"})
    assert ps.trace(model, X, (H, H)).num_units == 5


def test_explanations_name_the_state() -> None:
    words = " ".join(map(str, ps.explain(Language(), X, H).reasons))
    assert "'h'" in words and "Carried" in words
    # (an output alone, or inputs of other shapes, are no hint of a state)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    assert "Carried" not in " ".join(map(str, ps.explain(plain, torch.randn(2, 3)).reasons))


def test_a_state_that_does_not_exist_is_named() -> None:
    with pytest.raises(ps.InputError, match="'g'"):
        ps.Carried(Language(), {"g": 1})
    with pytest.raises(ps.InputError, match="7"):
        ps.Carried(Language(), {"h": 7})(X, H)
    with pytest.raises(ps.InputError, match="calls=1"):
        ps.Carried(Language(), {"h": 1}, calls=1)


class Squared(nn.Module):
    """The state is squared from call to call, so that no scale of it is free."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.read = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.write(x)) + h * h
        return self.read(h), h


def test_a_state_that_is_squared_stays_fixed() -> None:
    x, h = torch.randn(6, 3), torch.zeros(6, 4)
    assert ps.trace(ps.Carried(Squared(), {"h": 1}), x, h).num_units == 0


def test_a_flag_in_a_buffer_does_not_keep_a_model_from_other_sizes() -> None:
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
            self.places = nn.Parameter(torch.randn(10, 4))
            self.register_buffer("steps", torch.tensor(3))

        def forward(self, x: Tensor) -> Tensor:
            if self.steps > 5 or not bool(self.steps):
                x = x * 2
            return self.b(torch.relu(self.a(x) + self.places[: x.shape[1]]))

    assert "as captured at" in ps.trace(Flagged(), X).range
