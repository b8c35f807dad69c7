"""Recurrent layers, which are one operation in the captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import NEUTRAL, Value, constant, constants_like
from .contraction import linear
from .edges import arguments_of

# one direction of one layer: from a sequence, a number, weights (``None`` for absent biases) and
# whether it runs backwards, to its outputs and its last state
Cell = Callable[[Tensor, int, Sequence[Any], bool], tuple[Tensor, Tensor]]


def _stacked(
    semantics: Semantics, x: Value, state: Any, weights: Sequence[Value], args: Any, cell: Cell
) -> tuple[Tensor, Tensor]:
    """Layers of one or two directions, which read sequences along dimension 0; outputs, and all
    last states.
    """
    given = arguments_of(semantics, x, state, weights, *args)
    if "batch_first" not in given:
        # (no traced model has this overload)
        raise ValueError("a packed sequence")
    sequence, finals = semantics.activation(x), list[Tensor]()
    time = 1 if given["batch_first"] and sequence.dim() == 3 else 0
    sequence = sequence.movedim(time, 0)
    turns = (False, True)[: 1 + given["bidirectional"]]
    per = len(weights) // (given["num_layers"] * len(turns))
    for _ in range(given["num_layers"]):
        outputs = []
        for backwards in turns:
            own: list[Any] = list(weights[len(finals) * per :][:per])
            own[2:2] = [] if given["has_biases"] else [None, None]
            out, final = cell(sequence, len(finals), own, backwards)
            outputs.append(out)
            finals.append(final)
        sequence = torch.cat(outputs, -1) if len(turns) > 1 else outputs[0]
    return sequence.movedim(0, time), torch.stack(finals)


@rule("aten.rnn_relu", kind="recurrence")
def rnn_relu(
    semantics: Semantics, x: Value, state: Value, weights: Sequence[Value], *args: Any
) -> tuple[Tensor, Tensor]:
    """``h_t = relu(W_ih x_t + b_ih + W_hh h_(t-1) + b_hh)``, stacked (Eq. 1)."""
    start = semantics.activation(state)

    def cell(
        sequence: Tensor, number: int, own: Sequence[Any], backwards: bool
    ) -> tuple[Tensor, Tensor]:
        read, more = semantics.steps(sequence.flip(0) if backwards else sequence, 0)
        hidden, states = start[number], list[Tensor]()
        while len(states) < len(read):
            entered = linear(semantics, read[len(states)], own[0], own[2])
            carried = linear(semantics, hidden, own[1], own[3])
            before, hidden = hidden, semantics.join(entered, carried)
            if more and len(states) == len(read) - 1:
                hidden = semantics.join(before, hidden)
                if bool(((before == NEUTRAL) & (hidden != NEUTRAL)).any()):
                    continue
            states.append(hidden)
        # the remaining steps share every scale with the last interpreted one
        states += [hidden] * (len(sequence) - len(read))
        return torch.stack(states[::-1] if backwards else states), hidden

    return _stacked(semantics, x, state, weights, args, cell)


@rule("aten.rnn_tanh", "aten.lstm", "aten.gru", kind="gated recurrence")
def gated(semantics: Semantics, x: Value, state: Any, weights: Any, *args: Any) -> Any:
    """Tanh and gates fix their operands; inputs and projected states are free."""
    name, shown = semantics.place.op, semantics.place.result
    states = [semantics.activation(ids) for ids in (state if name == "aten.lstm" else [state])]
    semantics.pin(states[1:], "a cell state is combined with fixed scales")
    projected = name == "aten.lstm" and states[0].shape[-1] != states[1].shape[-1]

    def cell(
        sequence: Tensor, number: int, own: Sequence[Any], backwards: bool
    ) -> tuple[Tensor, Tensor]:
        # a single step reads the hidden state through its weights alone, as a cell does
        if number == 0 and (name == "aten.gru" or (not projected and len(sequence) > 1)):
            semantics.pin(states[:1], "a state is combined with fixed scales")
        # every step reads the same features and the same kind of state
        hidden, entered = states[0][number], semantics.reduce(sequence, [0])
        for _ in range(min(len(sequence), 2)):
            semantics.fix(linear(semantics, entered, own[0], own[2]))
            semantics.fix(linear(semantics, hidden, own[1], own[3]))
            hidden = constant(hidden.shape)
            if projected:
                inner = constant((*hidden.shape[:-1], own[1].shape[0] // 4))
                hidden = linear(semantics, inner, own[-1])
        return hidden.expand(len(sequence), *hidden.shape), hidden

    out, finals = _stacked(semantics, x, state, weights, args, cell)
    last = finals if projected else constant(shown[1].shape)
    return (out, last, *constants_like(shown[2:]))


# single steps are interpreted by what torch takes them apart into
state("aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", kind="gated recurrence")
state("aten.rnn_relu_cell", kind="recurrence")
