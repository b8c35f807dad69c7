"""Recurrent layers, which are one operation in the captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import NEUTRAL, Value, constant, shape_of
from .contraction import linear
from .edges import arguments_of

# one direction of one layer: from a sequence, a number, weights, and whether it runs
# backwards, to its outputs and its last state
Cell = Callable[[Tensor, int, Sequence[Value], bool], tuple[Tensor, Tensor]]


def _stacked(
    sequence: Tensor, weights: Sequence[Value], per: int, layers: int, both: bool, cell: Cell
) -> tuple[Tensor, list[Tensor]]:
    """Layers of one or two directions with ``per`` weights each; outputs and all last states."""
    finals: list[Tensor] = []
    for _ in range(layers):
        outputs = []
        for backwards in (False, True)[: 1 + both]:
            number = len(finals)
            own = weights[number * per : (number + 1) * per]
            out, final = cell(sequence, number, own, backwards)
            outputs.append(out)
            finals.append(final)
        sequence = torch.cat(outputs, -1) if both else outputs[0]
    return sequence, finals


def _settings(semantics: Semantics, *args: Any) -> list[Any]:
    """Whether there are biases, how many layers, two directions, and whether samples come first."""
    given = arguments_of(semantics, *args)
    if "batch_first" not in given:
        # (no traced model has this overload)
        raise ValueError("a packed sequence")
    return [given[name] for name in ("has_biases", "num_layers", "bidirectional", "batch_first")]


@rule("aten.rnn_relu", kind="recurrence")
def rnn_relu(
    semantics: Semantics, x: Value, state: Value, weights: Sequence[Value], *args: Any
) -> tuple[Tensor, Tensor]:
    """``h_t = relu(W_ih x_t + b_ih + W_hh h_(t-1) + b_hh)``, stacked (Eq. 1)."""
    biases, layers, bidirectional, batch_first = _settings(semantics, x, state, weights, *args)
    first, start = semantics.activation(x), semantics.activation(state)
    time = 1 if batch_first and first.dim() == 3 else 0

    def cell(
        sequence: Tensor, number: int, own: Sequence[Value], backwards: bool
    ) -> tuple[Tensor, Tensor]:
        read, more = semantics.steps(sequence.flip(time) if backwards else sequence, time)
        hidden, states = start[number], list[Tensor]()
        while len(states) < len(read):
            entered = linear(semantics, read[len(states)], own[0], own[2] if biases else None)
            carried = linear(semantics, hidden, own[1], own[3] if biases else None)
            before, hidden = hidden, semantics.join(entered, carried)
            if more and len(states) == len(read) - 1:
                hidden = semantics.join(before, hidden)
                if bool(((before == NEUTRAL) & (hidden != NEUTRAL)).any()):
                    continue
            states.append(hidden)
        # the remaining steps share every scale with the last interpreted one
        states += [hidden] * (sequence.shape[time] - len(read))
        return torch.stack(states[::-1] if backwards else states, time), hidden

    out, finals = _stacked(first, weights, 4 if biases else 2, layers, bidirectional, cell)
    return out, torch.stack(finals)


@rule("aten.rnn_tanh", "aten.lstm", "aten.gru", kind="gated recurrence")
def gated(semantics: Semantics, x: Value, state: Any, weights: Any, *args: Any) -> Any:
    """Tanh and gates fix their operands; inputs and projected states are free."""
    biases, layers, bidirectional, batch_first = _settings(semantics, x, state, weights, *args)
    name, shown = semantics.place.op, semantics.place.result
    first = semantics.activation(x)
    states = [
        semantics.activation(entry)
        for entry in (state if isinstance(state, list | tuple) else [state])
    ]
    semantics.pin(states[1:], "a cell state is combined with fixed scales")
    projected = (
        name == "aten.lstm" and len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]
    )
    time = 1 if batch_first and first.dim() == 3 else 0
    length = first.shape[time]
    # a single step reads the hidden state through its weights alone, as a cell does
    if name == "aten.gru" or (not projected and length > 1):
        semantics.pin(states[:1], "a state is combined with fixed scales")

    def cell(
        sequence: Tensor, number: int, own: Sequence[Value], backwards: bool
    ) -> tuple[Tensor, Tensor]:
        hidden = states[0][number]
        # every step reads the same features and the same kind of state
        entered = semantics.reduce(sequence, [time])
        for _ in range(min(length, 2)):
            semantics.fix(linear(semantics, entered, own[0], own[2] if biases else None))
            semantics.fix(linear(semantics, hidden, own[1], own[3] if biases else None))
            hidden = constant(hidden.shape)
            if projected:
                inner = constant((*hidden.shape[:-1], own[1].shape[0] // 4))
                hidden = linear(semantics, inner, own[-1])
        sizes = (*hidden.shape[:time], length, *hidden.shape[time:])
        return hidden.unsqueeze(time).expand(sizes), hidden

    per = (4 if biases else 2) + projected
    out, finals = _stacked(first, weights, per, layers, bidirectional, cell)
    last = torch.stack(finals) if projected else constant(shown[1].shape)
    return (out, last, *(constant(shape_of(entry)) for entry in shown[2:]))


# single steps are interpreted by what torch takes them apart into
state("aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", kind="gated recurrence")
state("aten.rnn_relu_cell", kind="recurrence")
