"""Channels that can be permuted: those with the same layout in the same tensors.

The reading of a graph gives a channel for every position along the dimensions of parameters and
buffers; channels with equally many positions in the same dimensions belong together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..inference.channels import Channels
from ..inference.sides import Side
from ..models.walk import tensors_of
from ..shown import Shown

Item = TypeVar("Item")
Failure = TypeVar("Failure")
# group, or its number -> (tensor, dimension) -> positions, shape (channels, positions)
Slices = Mapping[Any, Mapping[Side, Tensor]]


@dataclass(frozen=True, eq=False)
class ChannelGroup(Shown):
    """Channels with the same layout in the same tensors: they can be permuted.

    Attributes:
        name: the tensor that writes them.
        slices: (tensor, dimension) -> positions of every channel, shape ``(channels, positions)``.
        readers: those along which a weight reads the channels.
        reason: why none of them can be removed, or ``""``.
    """

    name: str
    slices: Mapping[Side, Tensor]
    readers: frozenset[Side]
    reason: str = ""

    def __len__(self) -> int:
        return len(next(iter(self.slices.values())))

    def __repr__(self) -> str:
        return f"ChannelGroup({self.name!r}, {len(self)} channels in {len(self.slices)} places)"


class Cut(NamedTuple):
    """Channels of one group to remove: all but those whose numbers are kept."""

    group: ChannelGroup
    kept: Tensor

    @property
    def positions(self) -> set[int]:
        """How many positions a channel has along the sides of its group, and 1."""
        return {1, *(where.shape[1] for where in self.group.slices.values())}

    def per_channel(self, value: Any) -> int:
        """A number by that of the channels, if it may count them, their positions, or equal parts
        of these (query heads that share a key head); else 0.
        """
        each, rest = divmod(value, len(self.group)) if type(value) is int else (0, 0)
        fits = each and not rest and any(size % each == 0 for size in self.positions)
        return each if fits else 0

    def removed(self, side: Side) -> Tensor:
        """Positions to remove along a side."""
        gone = torch.ones(len(self.group), dtype=torch.bool)
        gone[self.kept] = False
        return self.group.slices[side][gone].reshape(-1)


def real(tensor: Tensor) -> Tensor:
    """A tensor in float64 on the processor, complex numbers as pairs along a new last dimension."""
    own = tensor.detach().cpu()
    return torch.view_as_real(own.to(torch.complex128)) if own.is_complex() else own.double()


def channel_sums(slices: Slices, values: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Group -> sums over all entries of each channel, of values by the names of tensors."""
    dims: dict[str, set[int]] = defaultdict(set)
    for name, dim in (side for sides in slices.values() for side in sides):
        dims[name].add(dim)
    sums: dict[Side, Tensor] = {}
    for name, wanted in dims.items():
        entries = values(name)
        # (sums along the dimensions that hold no channels come first, because they are the same)
        idle = [dim for dim in range(entries.dim()) if dim not in wanted]
        entries = entries.sum(idle, keepdim=True) if idle else entries
        for dim in wanted:
            sums[name, dim] = entries.movedim(dim, 0).reshape(entries.shape[dim], -1).sum(1)
    return {
        group: torch.stack([sums[side][where].sum(1) for side, where in sides.items()]).sum(0)
        for group, sides in slices.items()
    }


def halved(
    items: Sequence[Item], failure: Callable[[Sequence[Item]], Failure]
) -> Iterator[tuple[Sequence[Item], Failure]]:
    """Runs of items that do not fail together, and single items with their failure."""
    reason = failure(items) if items else None
    if reason and len(items) > 1:
        half = len(items) // 2
        yield from halved(items[:half], failure)
        yield from halved(items[half:], failure)
    elif reason is not None:
        yield items, reason


def part_of(group: ChannelGroup, channels: Tensor) -> ChannelGroup:
    """Some channels of a group, by their numbers."""
    return replace(group, slices={side: at[channels] for side, at in group.slices.items()})


def alike_channels(found: Channels, model: nn.Module, known: set[Side]) -> Iterator[ChannelGroup]:
    """The channels of one reading by their layout, also single ones, but none of known sides."""
    positions, mixed = found.solve()
    order = {name: number for number, name in enumerate(tensors_of(model))}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    sides = {
        side: positions[side].numpy()
        for side in sorted(positions, key=lambda side: (order[side[0]], side[1]))
    }
    # channel -> its layout: those of one layout have equally many positions along each side
    # (sums of random multiples of the counts are equal where all counts are)
    size = max((int(channels.max()) for channels in sides.values()), default=0) + 1
    layouts = np.isin(np.arange(size), list(mixed)).astype(np.int64)
    factors = np.random.default_rng(0)
    for channels in sides.values():
        here, counts = np.unique(channels, return_counts=True)
        layouts[here] += counts * factors.integers(1 << 62)
    groups: dict[int, dict[Side, Tensor]] = {}
    reasons: dict[int, str] = {}
    # channel -> where it comes first
    start = np.zeros_like(layouts)
    for side, channels in sides.items():
        for layout in dict.fromkeys(layouts[np.unique(channels[channels > 0])].tolist()):
            where = np.flatnonzero((layouts[channels] == layout) & (channels > 0))
            numbers, at = np.unique(channels[where], return_index=True)
            if layout not in groups:
                groups[layout], reasons[layout] = {}, mixed.get(int(numbers[0]), "")
                start[numbers] = at
            rows = where[np.argsort(start[channels[where]], kind="stable")]
            groups[layout][side] = torch.from_numpy(rows.reshape(len(numbers), -1))
    for layout, slices in groups.items():
        # (of what no weight reads nothing is known: taps of a kernel that
        # are picked one by one, say)
        readers = frozenset(side for side in slices if side in found.reads)
        read = any(name in parameters for name, _ in slices) and (readers or not found.certain)
        if read and not known & slices.keys():
            writers = [side[0] for side in slices if side not in readers] or [next(iter(slices))[0]]
            writer = next((name for name in writers if name.endswith("weight")), writers[0])
            yield ChannelGroup(writer, slices, readers, reasons[layout])
