"""Packed sequences while a model is traced: each sequence counts as long as the longest one.

Lengths are data, so that code with packed sequences has no graph of its own. A packed sequence of
equal lengths is its padded batch, step by step. A shorter sequence ends in the state of an earlier
step, so that steps share their scales: with these, the graph for equal lengths has the units of
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import _VF, Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .patched_attributes import replaced

RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)


@contextmanager
def equal_lengths() -> Iterator[None]:
    """Pack sequences as if none had any padding, and let recurrent layers read padded
    batches; other threads pack as always.
    """
    thread = get_ident()

    def place(owner: Any, name: str, ours: Callable[..., Any]) -> tuple[Any, str, Any]:
        own = getattr(owner, name)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (ours if get_ident() == thread else own)(*args, **kwargs)

        return owner, name, chosen

    with replaced(
        place(_VF, "_pack_padded_sequence", _pack),
        place(_VF, "_pad_packed_sequence", _pad),
        *(place(kind, "forward", _padded(kind.forward)) for kind in RECURRENT),
    ):
        yield


def of_equal_lengths(given: Any) -> Any:
    """Inputs in which each packed sequence is one of equal lengths.

    Args:
        given: a nested structure of inputs.

    Example:
        >>> packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
        >>> of_equal_lengths(packed).batch_sizes
        tensor([2, 2, 2])
    """

    def filled(value: Any) -> Any:
        if not isinstance(value, PackedSequence):
            return value
        padded, _ = pad_packed_sequence(PackedSequence(*value[:2]))
        return PackedSequence(*_pack(padded, None, False), *value[2:])

    return pytree.tree_map(filled, given, is_leaf=lambda value: isinstance(value, PackedSequence))


def _pack(x: Tensor, _: Tensor | None, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The steps of a padded batch one after the other, and the number of sequences in each."""
    x = x.transpose(0, 1) if batch_first else x
    # the same numbers (a sum with nan is nan), written so that all steps share their scales
    x = torch.where(x.isnan(), x.sum(0), x)
    return x.flatten(0, 1), _number(x.shape[1], x.shape[0])


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
    return x.transpose(0, 1) if batch_first else x, _number(sizes.shape[0], x.shape[1])


def _padded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward method of a recurrent layer, which takes a packed sequence as a padded batch."""

    def padded(layer: Any, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, PackedSequence):
            return forward(layer, input, hx)
        # (rows that are no whole number of steps are those of one sequence)
        rows, steps = len(input.data), input.batch_sizes.shape[0]
        x = input.data.unflatten(0, (rows if rows % steps else steps, -1))
        if hx is not None:
            hx = layer.permute_hidden(hx, input.sorted_indices)
        y, state = forward(layer, x.transpose(0, 1) if layer.batch_first else x, hx)
        y = y.transpose(0, 1) if layer.batch_first else y
        packed = PackedSequence(y.flatten(0, 1), *input[1:])
        return packed, layer.permute_hidden(state, input.unsorted_indices)

    return padded


def _number(value: int, times: int) -> Tensor:
    """A tensor with numbers, which packed sequences are asked for."""
    with _disable_current_modes():
        return torch.full((times,), value)
