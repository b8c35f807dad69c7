"""Which channels of a group can change places, measured on the captured graph.

Channels with the same layout in the same tensors may still be treated differently: a part of them
passes another function, or a constant, an input or a buffer that other channels use as well meets
each of them. A graph with random weights computes something else then when they change places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.captured import Captured
from ..inference.channels import Channels, InnerChannels, NestedChannels
from ..inference.interpreter import interpret
from ..inference.random_run import DoubleRun, as_float64, graph_outputs, graph_values
from ..inference.sides import Side
from ..models.isolation import quiet, seed_torch
from ..models.running import distance
from ..models.values import on_cpu
from ..models.walk import tensors_of
from .equivariant import treats_channels_alike
from .groups import ChannelGroup, alike_channels, halved, part_of
from .matching import ordered
from .removal import corner

# differences above this, relative to the largest output, are not rounding errors of float64
ROUNDING = 1e-7
# weights are drawn once if there are many, else twice, and taken with both signs: rectifiers that
# are on hide differences
MANY, SIGNS = 100_000, (1, -1)
# largest number of tests for the channels of one group, and of passes over all groups
RUNS, ROUNDS = 64, 3
# models with more weights are not measured: it needs two copies of them in float64
LARGE = 1 << 28
# groups with so few channels may be permuted alike by chance
FEW = 3


def channel_groups(
    captured: Captured, model: nn.Module
) -> tuple[tuple[ChannelGroup, ...], dict[str, str]]:
    """The groups of channels of a captured model, and why other tensors have none."""
    with on_cpu():
        found, _ = interpret(captured, Channels)
        alike = list(alike_channels(found, model, set()))
        if found.several:
            known = {side for group in alike if len(group) > 1 for side in group.slices}
            alike += alike_channels(interpret(captured, InnerChannels)[0], model, known)
        several = [one for one in alike if len(one) > 1]
        if found.pinned or found.pinned_parameters or not treats_channels_alike(captured):
            several = exchangeable(several, captured)
        groups = tuple(_named(several))
    written = {side for group in groups for side in group.slices}
    lost: dict[str, str] = {}
    for group in alike:
        if written & group.slices.keys():
            continue
        if len(group) > 1:
            lost[group.name] = (
                "its channels cannot change places: the outputs change with their order"
            )
        elif any(where.shape[1] > 1 for where in group.slices.values()):
            lost[group.name] = "all its positions belong to one channel"
    return groups, lost


def unused(captured: Captured) -> list[str]:
    """Parameters that no operation of the graph reads, such as those of a head for training."""
    used = {node.name for node in captured.graph.graph.nodes if node.users}
    read = {source for name, source in captured.sources.items() if name in used}
    return [name for name in captured.parameters if ("parameter", name) not in read]


def nested_groups(
    captured: Captured, model: nn.Module, groups: Iterable[ChannelGroup]
) -> tuple[ChannelGroup, ...]:
    """Channels inside channels: features of one head, outputs of one group of a convolution."""
    tensors, owner, channels = tensors_of(model), dict[Side, Tensor](), 0
    for group in groups:
        for side, where in group.slices.items():
            if where.shape[1] > 1:
                size = tensors[side[0]].shape[side[1]]
                number = owner.setdefault(side, torch.full((size,), -1))
                number[where] = channels + torch.arange(len(where))[:, None]
        channels += len(group)
    with on_cpu():
        found, _ = interpret(captured, NestedChannels)
        inside = []
        for group in alike_channels(found, model, set()):
            shared = [side for side in group.slices if side in owner]
            if shared:
                numbers = owner[shared[0]][group.slices[shared[0]][:, 0]]
                rows = [(numbers == number).nonzero()[:, 0] for number in numbers.unique()]
                inside += [part_of(group, some) for some in rows if len(some) > 1]
        return tuple(_named(exchangeable(inside, captured, certain=False)))


def _named(found: Iterable[ChannelGroup]) -> Iterator[ChannelGroup]:
    """Give groups that one tensor writes different names."""
    met: Counter[str] = Counter()
    for group in found:
        met[group.name] += 1
        number = met[group.name]
        yield replace(group, name=f"{group.name} ({number})") if number > 1 else group


def exchangeable(
    groups: Sequence[ChannelGroup], captured: Captured, certain: bool = True
) -> list[ChannelGroup]:
    """Groups whose channels can be permuted; others in parts for which this holds.

    Nothing is measured if the model has no values, random results, or too many weights. Groups that
    are certain are returned then, and only :meth:`ChannelGroups.permute` compares.
    """
    size = sum(p.numel() for p in captured.parameters.values())
    moving = {name for group in groups for name, _ in group.slices}
    # (the smallest inputs on which the graph runs)
    for part in (corner, lambda value: value) if groups and size <= LARGE else ():
        with suppress(Exception):  # (the graph does not run in float64, or on these inputs)
            drawn = RandomisedGraph(captured, part, moving, draws=1 if size > MANY else 2)
            if drawn.repeats():
                break
    else:
        return list(groups) if certain else []
    found = list(groups)
    for _ in range(ROUNDS):
        if not (wrong := drawn.wrong(found)):
            break
        found = [
            part for group in found for part in (drawn.parts(group) if group in wrong else [group])
        ]
    return found


class RandomisedGraph:
    """A captured graph with random weights in float64, and its outputs on a part of its inputs."""

    def __init__(
        self, captured: Captured, part: Callable[[Any], Any], moving: set[str], draws: int
    ) -> None:
        self.captured, self.part = captured, part
        self.generator = torch.Generator().manual_seed(1)
        drawn = [_drawn(captured, moving, seed) for seed in range(draws)]
        self.draws = [(own, [self.outputs(own, sign) for sign in SIGNS]) for own in drawn]

    def repeats(self) -> bool:
        """Whether there are values, and outputs without random numbers of the graph's own."""
        drawn, (first, _) = self.draws[0]
        return bool(first) and distance(self.outputs(drawn, 1, seed=1), first) <= ROUNDING

    @torch.no_grad()
    def outputs(self, tensors: Mapping[str, Tensor], sign: int, seed: int = 0) -> list[Tensor]:
        """Outputs with parameters of one sign; ``seed`` draws what is random in the graph."""

        def signed(name: str, own: Tensor) -> Tensor:
            held = tensors.get(name, own)
            real = name in self.captured.parameters and held.is_floating_point()
            return -held if sign < 0 and real else held

        values = graph_values(self.captured, signed, self.part)
        if values is None:
            return []
        with quiet():
            seed_torch(seed)
            found = DoubleRun(self.captured.graph).run(*map(as_float64, values))
        return [leaf.double() for leaf in graph_outputs(self.captured, found)]

    def changes(self, groups: Sequence[ChannelGroup]) -> bool:
        """Whether outputs differ when the channels of each group go round."""
        slices = dict(enumerate(group.slices for group in groups))
        for tensors, wanted in self.draws:
            # (a random cycle moves every channel)
            cycles = (torch.randperm(len(group), generator=self.generator) for group in groups)
            orders = {number: cycle.roll(1)[cycle.argsort()] for number, cycle in enumerate(cycles)}
            moved = ordered(tensors, slices, orders)
            for sign, before in zip(SIGNS, wanted, strict=True):
                if distance(self.outputs(moved, sign), before) > ROUNDING:
                    return True
        return False

    def wrong(self, groups: Sequence[ChannelGroup]) -> list[ChannelGroup]:
        """The groups whose channels cannot be permuted."""
        few = [group for group in groups if len(group) <= FEW]
        coded = [
            [group for number, group in enumerate(few) if number >> bit & 1]
            for bit in range(len(few).bit_length())
        ]
        tried = (pair for some in (groups, *coded) for pair in halved(some, self.changes))
        return list(dict.fromkeys(some[0] for some, changes in tried if changes))

    def parts(self, group: ChannelGroup) -> list[ChannelGroup]:
        """The largest sets of channels that can be permuted; none if there are many kinds."""
        left = iter(range(RUNS))
        sets: list[list[int]] = []

        def differ(channels: Sequence[int]) -> bool:
            return self.changes([part_of(group, torch.tensor(channels))])

        def counted(channels: Sequence[int]) -> bool:
            return len(channels) > 1 and next(left, None) is not None and differ(channels)

        for part, _ in halved(range(len(group)), counted):
            for other in sets:
                if next(left, None) is None:
                    return []
                if not differ([other[0], part[0]]):
                    other += part
                    break
            else:
                sets.append(list(part))
        return [part_of(group, torch.tensor(sorted(some))) for some in sets if len(some) > 1]


def _drawn(captured: Captured, moving: set[str], seed: int) -> dict[str, Tensor]:
    """Random values in float64 for parameters, and multiples for buffers that have channels."""
    generator, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, tensor in (*captured.parameters.items(), *captured.buffers.items()):
        own = as_float64(tensor.detach().clone())
        if own.is_floating_point() and name in captured.parameters:
            rows = own.shape[0] if own.numel() > max(own.shape, default=1) else own.numel()
            noise = torch.rand(own.shape, generator=generator).to(own.device).sub_(0.5).double()
            own = noise.mul_((12 * rows / max(own.numel(), 1)) ** 0.5)
        elif own.is_floating_point() and name in moving:
            factor = 0.5 + torch.rand(own.shape, generator=generator, dtype=torch.float64)
            own = own * factor.to(own.device)
        found[name] = own
    return found
