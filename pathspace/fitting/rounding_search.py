"""Rounded weights of a model in any gauge, and a search near a gauge for
rounding errors that cancel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..gauge.moves import moved
from ..graph.structure import Structure
from .quantise import quantised_weights, weight_axes

# largest change of a log-scale
WIDTH = 0.1


class Rounded:
    """Tensors of a model in other gauges, with the quantised ones rounded to a few bits.

    Args:
        model: the model; it is not changed.
        graph: its reduction graph.
        bits: bits of each weight.
        per: one rounding step per ``"tensor"`` or per ``"channel"``.
    """

    def __init__(self, model: nn.Module, graph: Structure, bits: int, per: str) -> None:
        self.graph, self.bits, self.per, self.axes = graph, bits, per, weight_axes(model)
        self.own = {
            name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())
        }

    def at(self, phi: Tensor, start: Tensor | None = None) -> dict[str, Tensor]:
        """All tensors at ``phi``; with ``start``, only those that differ from
        the tensors at ``start``.

        Args:
            phi: log-scales, ``(H,)``.
            start: log-scales to compare with, ``(H,)``.
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
        """Indices of the output units of each quantised tensor; equal sets are listed once."""
        heads = {
            block.name: block.head.abs().unique()
            for block in self.graph.blocks
            if block.name in self.axes
        }
        units = (
            {int(i) - 1 for i in ids if 0 < i <= self.graph.num_units} for ids in heads.values()
        )
        return [
            torch.tensor(group)
            for group in dict.fromkeys(tuple(sorted(one)) for one in units)
            if group
        ]


def searched(
    rounded: Rounded,
    phi: Tensor,
    noise: Callable[[dict[str, Tensor]], float],
    trials: int,
    seed: int = 0,
) -> Tensor:
    """A gauge near ``phi`` in which the errors of rounded weights cancel better.

    To first order the noise depends only on the rounding steps; the rounding errors behave like
    random numbers, and a small change of a scale gives new ones. Each trial moves the output units
    of one tensor at random, and keeps the move if the noise falls.

    Args:
        rounded: the tensors of the model.
        phi: log-scales to start from, ``(H,)``.
        noise: the quantity to reduce, as a function of the model's tensors.
        trials: number of trials.
        seed: seed of the random moves.

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
