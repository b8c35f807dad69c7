"""Channels that can be permuted: those with the same layout in the same tensors.

The reading of a graph gives a channel for every position along the dimensions of parameters and
buffers; channels with equally many positions in the same dimensions belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..inference.channels import Channels, Side
from ..models.walk import tensors_of


@dataclass(frozen=True, eq=False)
class ChannelGroup:
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
        """Number of channels."""
        return len(next(iter(self.slices.values())))

    def __repr__(self) -> str:
        """Name and size."""
        return f"ChannelGroup({self.name!r}, {len(self)} channels in {len(self.slices)} places)"


class Cut(NamedTuple):
    """Channels of one group to remove.

    Attributes:
        slices: (tensor, dimension) -> positions of every channel, shape ``(channels, positions)``.
        readers: sides along which a weight reads the channels.
        kept: numbers of the channels to keep.
    """

    slices: Mapping[Side, Tensor]
    readers: frozenset[Side]
    kept: Tensor

    @property
    def channels(self) -> int:
        """Number of channels of the group."""
        return len(next(iter(self.slices.values())))

    def removed(self, side: Side) -> Tensor:
        """Positions to remove along a side."""
        gone = torch.ones(self.channels, dtype=torch.bool)
        gone[self.kept] = False
        return self.slices[side][gone].reshape(-1)


def part_of(group: ChannelGroup, channels: Tensor) -> ChannelGroup:
    """Some channels of a group, by their numbers."""
    return replace(group, slices={side: at[channels] for side, at in group.slices.items()})


def alike_channels(found: Channels, model: nn.Module, known: set[Side]) -> Iterator[ChannelGroup]:
    """The channels of one reading, those of one layout together: also single ones.

    Args:
        found: the reading.
        model: the model, or another of the same architecture.
        known: (tensor, dimension) of channels of an earlier reading, which are left out.
    """
    positions, mixed = found.solve()
    order = {name: number for number, name in enumerate(tensors_of(model))}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    members: dict[int, dict[Side, np.ndarray]] = {}
    for side in sorted(positions, key=lambda side: (order[side[0]], side[1])):
        numbers, counts = np.unique(positions[side].numpy(), return_counts=True)
        places = np.split(np.argsort(positions[side].numpy(), kind="stable"), counts.cumsum()[:-1])
        for channel, where in zip(numbers.tolist(), places, strict=True):
            if channel:
                members.setdefault(channel, {})[side] = where
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
