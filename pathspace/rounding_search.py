"""Rounded weights of a model in any gauge, and a search near one for rounding errors that cancel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pathspace.moves import moved
from pathspace.quantise import quantised_weights, weight_axes
from pathspace.structure import Structure

# log-scales are moved by this much at most
WIDTH = 0.1


class Rounded:
    """Tensors of a model in other gauges, those that are quantised rounded to a few bits.

    Args:
        model: the model; it is not changed.
        graph: its reduction graph.
        bits: of each weight.
        per: one step for each ``"tensor"`` or ``"channel"``.
    """

    def __init__(self, model: nn.Module, graph: Structure, bits: int, per: str) -> None:
        self.graph, self.bits, self.per, self.axes = graph, bits, per, weight_axes(model)
        self.own = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}

    def at(self, phi: Tensor, start: Tensor | None = None) -> dict[str, Tensor]:
        """All tensors at ``phi``; with ``start``, those that differ from the ones there.

        Args:
            phi: log-scales, ``(H,)``.
            start: others.
        """
        factors = self.graph.gauge_factors(phi)
        names = set(self.own if start is None else factors)
        if start is not None:
            before = self.graph.gauge_factors(start)
            names = {n for n in names if not all(map(torch.equal, factors[n], before[n]))}
        found = {name: self.own[name] for name in names}
        for name in names & set(factors):
            found[name] = moved(self.own[name], *factors[name], self.graph.shifts.get(name, 0.0))
        rounded = {name: axis for name, axis in self.axes.items() if name in names}
        return found | quantised_weights(found, rounded, self.bits, self.per)

    def groups(self) -> list[Tensor]:
        """Indices of the units that the quantised weights write, one set for each tensor."""
        heads = {block.name: block.head.abs().unique() for block in self.graph.blocks if block.name in self.axes}
        units = ({int(i) - 1 for i in ids if 0 < i <= self.graph.num_units} for ids in heads.values())
        return [torch.tensor(group) for group in dict.fromkeys(tuple(sorted(one)) for one in units) if group]


def searched(
    rounded: Rounded, phi: Tensor, noise: Callable[[dict[str, Tensor]], float], trials: int, seed: int = 0
) -> Tensor:
    """A gauge near ``phi`` in which the errors of rounded weights cancel better.

    To first order the noise depends on the steps alone; the errors themselves are as good as random, and a small change
    of a scale draws others. The units that one tensor writes are moved at random, and stay where the noise falls.

    Args:
        rounded: the tensors of the model.
        phi: log-scales to start from, ``(H,)``.
        noise: what is to fall, for tensors in place of the model's own.
        trials: how often to try.
        seed: of the random moves.

    Returns:
        The log-scales with the least noise.
    """
    groups, generator = rounded.groups(), torch.Generator().manual_seed(seed)
    if not groups or trials < 1:
        return phi
    now = rounded.at(phi)
    least, order = noise(now), list(range(len(groups)))
    for trial in range(trials):
        if trial % len(groups) == 0:
            order = torch.randperm(len(groups), generator=generator).tolist()
        group, move = groups[order[trial % len(groups)]], torch.zeros_like(phi)
        move[group] = WIDTH * (2 * torch.rand(len(group), generator=generator, dtype=phi.dtype) - 1)
        there = phi + rounded.graph.exact_part(move)
        tensors = now | rounded.at(there, phi)
        found = noise(tensors)
        if found < least:
            phi, now, least = there, tensors, found
    return phi


__all__ = ["Rounded", "searched"]
