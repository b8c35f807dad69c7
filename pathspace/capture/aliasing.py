"""Tensors that lie in the same memory, under other names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn, strided

from ..errors import InputError
from ..models.values import has_values
from ..models.walk import every_tensor
from .captured import Captured


def memory_of(tensor: Tensor) -> tuple[int, int, bool]:
    """The first byte of a tensor's elements, the byte after the last, and whether the tensor fills
    all memory between them; nothing (``0, 0, True``) for tensors without such memory.
    """
    if not storage_of(tensor) or not tensor.numel():
        return 0, 0, True
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size(), last + 1 == tensor.numel()


def storage_of(tensor: Tensor) -> int:
    """Where the memory of a tensor and of its views begins; 0 for tensors without such memory."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == strided
    return tensor.untyped_storage().data_ptr() if plain and has_values(tensor) else 0


def check_memory(model: nn.Module) -> None:
    """Refuse different parameters that share memory, because rescaling one changes the other."""
    held, named = [], every_tensor(model, "_parameters", repeated=False)
    for parameter, name in {id(p): (p, name) for name, p in reversed(named.items())}.values():
        start, end, filled = memory_of(parameter)
        if start:
            # first and last byte are enough if the parameter fills all memory between them
            held.append((start, end if filled else start, name))
    held.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(held):
        if start < end:
            raise InputError(
                f"{type(model).__name__} has parameters {name!r} and {other!r} in the same memory;"
                " make them one parameter, by assigning the parameter itself instead of its data."
            )


def read_elsewhere(captured: Captured) -> frozenset[str]:
    """Names of parameters and buffers whose numbers a model reads in another way, too: as a
    constant or buffer in the same memory, or as a number that its code asks for.

    Tensors count as sharing memory where one begins before the other ends.
    """
    named = [*captured.parameters.items(), *captured.buffers.items()]
    starts, ends = np.array([memory_of(tensor)[:2] for _, tensor in named]).reshape(-1, 2).T

    def meeting(start: int, end: int) -> list[tuple[str, Tensor]]:
        return [named[number] for number in np.flatnonzero((starts < end) & (start < ends))]

    found: set[str] = set()
    for own in {id(tensor): tensor for tensor in _read(captured)}.values():
        met = meeting(*memory_of(own)[:2])
        if any(tensor is not own for _, tensor in met):
            found.update(name for name, _ in met)
    for memory in captured.numbers:
        found.update(name for name, _ in meeting(*memory))
    return frozenset(found)


def _read(captured: Captured) -> Iterator[Tensor]:
    """Constants and buffers that the graph reads."""
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder" and node.users:
            kind, name = captured.sources.get(node.name, ("", ""))
            if kind == "buffer" and name in captured.buffers:
                yield captured.buffers[name]
            elif node.name in captured.constants:
                yield captured.constants[node.name]
