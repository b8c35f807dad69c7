"""Channels that can be permuted: those with the same layout in the same tensors.

The reading of a graph gives a channel for every position along the dimensions of parameters and
buffers; channels with equally many positions in the same dimensions belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..inference.channels import Channels, Side
from ..models.walk import tensors_of
from ..shown import Shown


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


def channel_sums(sides: Mapping[Side, Tensor], values: Callable[[str], Tensor]) -> Tensor:
    """Sums over all entries of each channel, of values by the names of tensors."""
    total = torch.zeros(len(next(iter(sides.values()))), dtype=torch.float64)
    for (name, dim), where in sides.items():
        entries = values(name)
        others = [other for other in range(entries.dim()) if other != dim]
        total += (entries.sum(others) if others else entries)[where].sum(1)
    return total


def part_of(group: ChannelGroup, channels: Tensor) -> ChannelGroup:
    """Some channels of a group, by their numbers."""
    return replace(group, slices={side: at[channels] for side, at in group.slices.items()})


def alike_channels(found: Channels, model: nn.Module, known: set[Side]) -> Iterator[ChannelGroup]:
    """The channels of one reading, those of one layout together: also single ones, but none of
    known sides.
    """
    positions, mixed = found.solve()
    order = {name: number for number, name in enumerate(tensors_of(model))}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    members: dict[int, dict[Side, np.ndarray]] = {}
    for side in sorted(positions, key=lambda side: (order[side[0]], side[1])):
        numbers, counts = np.unique(positions[side].numpy(), return_counts=True)
        places, start = np.argsort(positions[side].numpy(), kind="stable"), 0
        for channel, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if channel:
                members.setdefault(channel, {})[side] = places[start : start + count]
            start += count
    alike: dict[tuple[Any, ...], list[int]] = {}
    for channel, slices in members.items():
        signature = (channel in mixed, *((side, len(where)) for side, where in slices.items()))
        alike.setdefault(signature, []).append(channel)
    for together in alike.values():
        sides = members[together[0]]
        # (of what no weight reads nothing is known: taps of a kernel that
        # are picked one by one, say)
        read = any(name in parameters for name, _ in sides) and (
            not found.certain or any(side in found.reads for side in sides)
        )
        if read and not known & set(sides):
            yield _alike(
                [members[channel] for channel in together],
                found.reads,
                mixed.get(together[0], ""),
            )


def _alike(
    together: Sequence[Mapping[Side, np.ndarray]],
    reads: set[Side],
    reason: str,
) -> ChannelGroup:
    """Channels in the order of their first positions, with the tensor that writes them."""
    first = next(iter(together[0]))
    together = sorted(together, key=lambda slices: int(slices[first][0]))
    slices = {
        side: torch.from_numpy(np.stack([one[side] for one in together])) for side in together[0]
    }
    readers = frozenset(side for side in slices if side in reads)
    writers = [name for name, dim in slices if (name, dim) not in readers] or [first[0]]
    writer = next((name for name in writers if name.endswith("weight")), writers[0])
    return ChannelGroup(writer, slices, readers, reason)
