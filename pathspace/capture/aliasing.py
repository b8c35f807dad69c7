"""Tensors that lie in the same memory, under other names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn, strided

from ..models.values import has_values
from .captured import Captured

# elements up to which the places of all are compared
LARGEST = 1 << 22


def memory_of(tensor: Tensor) -> tuple[int, int, bool]:
    """The first byte of a tensor's elements, the byte after the last, and whether the tensor fills
    all memory between them; nothing (``0, 0, True``) for tensors without such memory.

    Example:
        >>> import torch
        >>> start, end, filled = memory_of(torch.zeros(3, 2).T[0])
        >>> end - start, filled
        (20, False)
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


def read_elsewhere(captured: Captured) -> frozenset[str]:
    """Names of parameters and buffers whose numbers a model reads in another way, too: as a
    constant or buffer in the same memory, or as a number that its code asks for.
    """
    held: dict[int, tuple[Tensor, list[str], bool]] = {}
    for name, tensor in (*captured.parameters.items(), *captured.buffers.items()):
        held.setdefault(id(tensor), (tensor, [], False))[1].append(name)
    for tensor in _read(captured):
        before = held.get(id(tensor), (tensor, [], True))
        held[id(tensor)] = (*before[:2], True)
    found: set[str] = set()
    for group in _sharing(held.values()):
        for one in (entry for entry in group if entry[2]):
            for other in group:
                if other is not one and share(one[0], other[0]):
                    found.update((*one[1], *other[1]))
    for start, end in captured.numbers:
        for tensor, names, _ in held.values():
            first, last, _ = memory_of(tensor)
            if first < end and start < last:
                found.update(names)
    return frozenset(found)


def share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in the same memory.

    Example:
        >>> import torch
        >>> base = torch.zeros(4, 3)
        >>> share(base[:, :2], base[:, 2:]), share(base[:, :2], base[:, 1:])
        (False, True)
    """
    (start, end, filled), (first, last, full) = memory_of(one), memory_of(other)
    if start >= last or first >= end:
        return False
    same = one.dtype == other.dtype and max(one.numel(), other.numel()) <= LARGEST
    if (filled and full) or not same:
        return True
    sizes = [tensor.element_size() for tensor in (one, other)]
    places = [
        torch.as_tensor(first // size + _offsets(tensor))
        for first, size, tensor in zip((start, first), sizes, (one, other), strict=True)
    ]
    return bool(torch.isin(*places).any())


def _offsets(tensor: Tensor) -> Tensor:
    """Places of a tensor's elements, counted from its first."""
    total = torch.zeros((), dtype=torch.long)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        total = total.unsqueeze(-1) + torch.arange(size) * step
    return total.reshape(-1)


def _read(captured: Captured) -> Iterator[Tensor]:
    """Constants and buffers that the graph reads."""
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder" and node.users:
            kind, name = captured.sources.get(node.name, ("", ""))
            if kind == "buffer" and name in captured.buffers:
                yield captured.buffers[name]
            elif node.name in captured.constants:
                yield captured.constants[node.name]


def _sharing(
    held: Iterable[tuple[Tensor, list[str], bool]],
) -> Iterator[list[tuple[Tensor, list[str], bool]]]:
    """Groups of tensors whose memory overlaps."""
    spans = sorted(
        ((*memory_of(entry[0])[:2], number, entry) for number, entry in enumerate(held)),
        key=lambda span: span[:3],
    )
    group: list[tuple[Tensor, list[str], bool]] = []
    reached = 0
    for start, end, _, entry in spans:
        if not start:
            continue
        if group and start >= reached:
            yield group
            group = []
        group.append(entry)
        reached = max(reached, end)
    if group:
        yield group
