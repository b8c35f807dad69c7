"""Packed sequences, read as if none had any padding.

How many sequences reach each step is data. All steps share their weights, so a batch in which all
sequences have full length meets the same operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..models.values import with_numbers

_LAYERS = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)


class PaddedSequences(TorchFunctionMode):
    """Packs sequences as if none had any padding, and lets recurrent layers read padded batches."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_pack_padded_sequence":
            return _pack(args[0], args[2])
        if name == "_pad_packed_sequence":
            return _pad(*args)
        if func in _LAYERS and isinstance(args[3], list | tuple):
            # (data, batch sizes, first states, weights, ...): the layer of a packed sequence
            data, sizes, states, weights, *rest = args
            steps = data.unflatten(0, (sizes.shape[0], -1))
            found, *last = func(steps, states, weights, *rest, False)
            return (found.flatten(0, 1), *last)
        return func(*args, **(kwargs or {}))


def equal_steps(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook of recurrent layers: as many sequences reach each step of a packed sequence."""
    packed, *rest = args
    if not isinstance(packed, PackedSequence):
        return args
    # (rows that are no whole number of steps are those of one sequence)
    rows, steps = len(packed.data), packed.batch_sizes.shape[0]
    steps = rows if rows % steps else steps
    return PackedSequence(packed.data, _repeated(rows // steps, steps), *packed[2:]), *rest


def of_equal_lengths(given: Any) -> Any:
    """Nested inputs in which each packed sequence is one of equal lengths."""

    def filled(value: Any) -> Any:
        if not isinstance(value, PackedSequence):
            return value
        padded, _ = pad_packed_sequence(PackedSequence(*value[:2]))
        return PackedSequence(*_pack(padded, False), *value[2:])

    return pytree.tree_map(filled, given, is_leaf=lambda value: isinstance(value, PackedSequence))


def _pack(x: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The steps of a padded batch one after the other, and the number of sequences in each."""
    x = x.transpose(0, 1) if batch_first else x
    # the same numbers (a sum with nan is nan), written so that all steps share their scales
    x = torch.where(x.isnan(), x.sum(0), x)
    return x.flatten(0, 1), _repeated(x.shape[1], x.shape[0])


def _pad(
    data: Tensor, sizes: Tensor, batch_first: bool, padding: float, length: int
) -> tuple[Tensor, Tensor]:
    """The padded batch of steps, and the lengths of its sequences."""
    x = data.unflatten(0, (sizes.shape[0], -1))
    if padding:
        # shorter sequences end in this number, so that it shares their scale
        x = torch.where(x.isnan(), padding, x)
    if length > len(x):
        x = torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), padding)])
    return x.transpose(0, 1) if batch_first else x, _repeated(sizes.shape[0], x.shape[1])


def _repeated(value: int, times: int) -> Tensor:
    """A tensor with numbers, which packed sequences are asked for."""
    with with_numbers():
        return torch.full((times,), value)
