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
    held: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in (*captured.parameters.items(), *captured.buffers.items()):
        held.setdefault(id(tensor), (tensor, []))[1].append(name)
    read = {id(tensor): tensor for tensor in _read(captured)}
    every = [*held.values(), *((read[key], list[str]()) for key in read.keys() - held.keys())]
    starts, ends = np.array([memory_of(tensor)[:2] for tensor, _ in every]).reshape(-1, 2).T

    def meeting(start: int, end: int) -> np.ndarray:
        return np.flatnonzero((starts < end) & (start < ends))

    found: set[str] = set()
    for number in [number for number, (tensor, _) in enumerate(every) if id(tensor) in read]:
        others = meeting(starts[number], ends[number])
        if len(others) > 1:
            found.update(name for other in others for name in every[other][1])
    for start, end in captured.numbers:
        found.update(name for other in meeting(start, end) for name in every[other][1])
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
