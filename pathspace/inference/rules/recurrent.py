"""Recurrent layers, which are one operation in the captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import Value, constant, shape_of
from .contraction import linear


@rule("aten.rnn_relu", kind="recurrence")
def rnn_relu(
    semantics: Semantics,
    x: Value,
    state: Value,
    weights: Sequence[Value],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """``h_t = relu(W_ih x_t + b_ih + W_hh h_(t-1) + b_hh)``, stacked (Eq. 1)."""
    _check_padded(biases)
    sequence = semantics.activation(x)
    hidden = semantics.activation(state)
    time = 1 if batch_first and sequence.dim() == 3 else 0
    per, directions = (4 if biases else 2), (2 if bidirectional else 1)
    last = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            cell = layer * directions + direction
            parameters = weights[cell * per : (cell + 1) * per]
            out, final = _direction(
                semantics, sequence, hidden[cell], parameters, biases, time, direction == 1
            )
            outputs.append(out)
            last.append(final)
        sequence = torch.cat(outputs, -1) if directions == 2 else outputs[0]
    return sequence, torch.stack(last)


def _check_padded(biases: Any) -> None:
    """Refuse the overload for packed sequences, which no traced model has."""
    if not isinstance(biases, bool):
        raise ValueError("a packed sequence")


def _direction(
    semantics: Semantics,
    sequence: Tensor,
    hidden: Tensor,
    weights: Sequence[Value],
    biases: bool,
    time: int,
    backwards: bool,
) -> tuple[Tensor, Tensor]:
    length = sequence.shape[time]
    looked_at = semantics.steps(length)
    ordered = sequence.flip(time) if backwards else sequence
    states: list[Tensor] = []
    for number in range(looked_at):
        read = semantics.step(ordered, time, number)
        while True:
            entered = linear(semantics, read, weights[0], weights[2] if biases else None)
            carried = linear(semantics, hidden, weights[1], weights[3] if biases else None)
            before, hidden = hidden, semantics.join(entered, carried)
            if not semantics.stands_for_more(number, length):
                break
            hidden = semantics.join(before, hidden)
            if semantics.is_settled([before], [hidden]):
                break
        states.append(hidden)
    # the remaining steps share every scale with the last interpreted one
    states += [states[-1]] * (length - looked_at)
    if backwards:
        states.reverse()
    return torch.stack(states, time), hidden


@rule("aten.rnn_tanh", "aten.lstm", "aten.gru", kind="gated recurrence")
def gated(
    semantics: Semantics, x: Value, state: Any, weights: Any, biases: bool, layers: int, *args: Any
) -> Any:
    """Tanh and gates fix their operands; inputs and projected states are free."""
    _check_padded(biases)
    bidirectional, batch_first = args[2:4]
    name = semantics.place.op
    sequence = semantics.activation(x)
    states = [
        semantics.activation(entry)
        for entry in (state if isinstance(state, list | tuple) else [state])
    ]
    semantics.pin(states[1:], "a cell state is combined with fixed scales")
    projected = (
        name == "aten.lstm" and len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]
    )
    per, directions = (4 if biases else 2) + projected, 2 if bidirectional else 1
    time = 1 if batch_first and sequence.dim() == 3 else 0
    length = sequence.shape[time]
    # a single step reads the hidden state through its weights alone, as a cell does
    if name == "aten.gru" or (not projected and length > 1):
        semantics.pin(states[:1], "a state is combined with fixed scales")
    finals = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            cell = layer * directions + direction
            own = weights[cell * per : (cell + 1) * per]
            hidden = states[0][cell]
            # every step reads the same features and the same kind of state
            entered = semantics.reduce(sequence, [time])
            for _ in range(min(length, 2)):
                gates = linear(semantics, entered, own[0], own[2] if biases else None)
                carried = linear(semantics, hidden, own[1], own[3] if biases else None)
                semantics.fix(gates)
                semantics.fix(carried)
                free = (
                    linear(semantics, constant((*hidden.shape[:-1], own[1].shape[0] // 4)), own[-1])
                    if projected
                    else None
                )
                hidden = constant(hidden.shape) if free is None else free
            finals.append(hidden)
            outputs.append(
                hidden.unsqueeze(time).expand(*hidden.shape[:time], length, *hidden.shape[time:])
            )
        sequence = torch.cat(outputs, -1) if directions == 2 else outputs[0]
    shown = semantics.place.result
    last = torch.stack(finals) if projected else constant(shown[1].shape)
    return (sequence, last, *(constant(shape_of(entry)) for entry in shown[2:]))


# single steps are interpreted by what torch takes them apart into
state("aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", kind="gated recurrence")
state("aten.rnn_relu_cell", kind="recurrence")
