r"""Keep a network in its canonical gauge during training, by a sweep over all units now and then.

If its neighbours do not change, a unit is balanced exactly by ``phi += 1/4 log(L / E)``, with ``E``
the squares of entering and ``L`` of leaving weights; a unit of fixed norm is corrected by ``phi -=
1/2 mean log(E / target)``. A sweep changes all units at once, balanced ones by this much over the
largest number of scales at one weight: the sum of squares then still decreases, by the inequality
of arithmetic and geometric means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from pathspace.graph.structure import Structure
from pathspace.inference.union_find import UnionFind

from .canonical_gauge import BALANCED, LEFT, Canonical, Side, Votes, incidence, sides

# a side, its factor, and that of its buffers, if they change
Moved = tuple[Side, Tensor, Tensor | None]
# a sweep reads and writes all weights, so that not every step has one
EVERY = 3


class Sweep:
    """The sweep over all units of a graph.

    Args:
        graph: the reduction graph.
        found: its canonical representative.
        device: the device of the parameters.
        norms: as for :func:`pathspace.training.optim.canonical_gauge.canonical`.

    Attributes:
        sides: sides of weights, over which squares are summed; then the running statistics that
            are rescaled with them.
        follows: whether a balanced unit is at an entry, for each of them.
    """

    def __init__(
        self, graph: Structure, found: Canonical, device: torch.device, norms: str
    ) -> None:
        weights = sides(graph)
        runs = [
            (Side(name, entry.units, 1, None, graph.shifts.get(name, 0.0)), power)
            for entry in graph.statistics
            for name, power in entry.powers.items()
        ]
        self.sides = [*weights, *(side for side, _ in runs)]
        self._sizes = [side.ids.numel() for side in self.sides]
        self._summed = len(weights)
        unit, entry, power = incidence(graph, self.sides)
        of_side = np.repeat(np.arange(len(self.sides)), self._sizes)[entry]
        times = np.array([*(1 for _ in weights), *(power for _, power in runs)])
        power = power * times[of_side]
        balanced = found.kinds == BALANCED
        self.follows = np.isin(np.arange(len(self.sides)), of_side[balanced[unit]]).tolist()
        # most scales at one weight, which may change together
        width = 2 * max(1, abs(graph.expand).sum(1).max(initial=1))
        alone = 1 / (1 + (found.kinds == LEFT).any())

        def on(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.as_tensor(array, dtype=dtype, device=device)

        self._unit, self._entry = on(unit), on(entry)
        self._power = on(power, torch.float64)
        self._pairs = int((of_side < len(weights)).sum())
        self._balanced = on(balanced, torch.bool)
        self._rate = on(np.where(balanced, 1 / width, alone), torch.float64)
        self._kinds = on(found.kinds, torch.float64)
        self._votes = Votes.of(graph, found.targets, norms, device)

    def step(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, list[Moved]]:
        """The change of the units' log-scales, and the factors of all tensors at them.

        Buffers follow balanced units only. That a unit comes back to a fixed norm is not a change
        of coordinates but part of the step: first moments that followed would grow by ``1 / f``
        where the norm shrinks by ``f``, each time, and overflow where ``f^2`` is below their decay.

        Args:
            tensors: parameters by name.

        Returns:
            Changes, one for each unit; sides with their factors and those that buffers follow,
            which are broadcastable to their tensors.
        """
        weights = self.sides[: self._summed]
        squares = torch.cat([side.squares(tensors[side.name]).reshape(-1) for side in weights])
        n, count = self._pairs, len(self._rate)
        power = self._power[:n]
        # sums of entering, then of leaving squares
        place = self._unit[:n] + count * (power < 0)
        entering, leaving = (
            squares.new_zeros(2 * count)
            .index_add_(0, place, squares[self._entry[:n]] * power.abs())
            .view(2, -1)
        )
        known = self._balanced & (entering > 0) & (leaving > 0)
        even = torch.where(known, self._rate / 4 * (leaving / entering).log(), 0.0)
        off = self._votes.deviation(squares)
        change = even - self._rate / 2 * self._kinds * off
        factors, followed = self._factors(change), self._factors(even)
        return change, [
            (side, factor, mine if follows else None)
            for side, factor, mine, follows in zip(
                self.sides, factors, followed, self.follows, strict=True
            )
        ]

    def _factors(self, change: Tensor) -> list[Tensor]:
        """The factor of each side, after changes of log-scales."""
        logs = change.new_zeros(sum(self._sizes))
        logs.index_add_(0, self._entry, self._power * change[self._unit])
        parts = logs.exp_().split(self._sizes)
        return [part.view(side.ids.shape) for side, part in zip(self.sides, parts, strict=True)]


def movable(graph: Structure, names: Collection[str]) -> tuple[Structure, csr_array]:
    """Merge units connected by a frozen weight, which is constant only if both
    ends have the same scale.

    Units that frozen weights connect to the root are fixed, and so are all factors of a
    product at a frozen weight.

    Returns:
        The graph of the tensors that may change over merged units; and the integer matrix
        ``(H, merged)`` from log-scales of merged units to those of units.
    """
    count = graph.num_units + 1
    scales = UnionFind()
    units = scales.fresh((graph.num_units,))
    for block in graph.blocks:
        if block.name not in names:
            plain = [
                torch.where(ids.abs() < count, ids, 0)
                for ids in torch.broadcast_tensors(block.tail, block.head)
            ]
            scales.unify(plain[0], plain[1])
            derived = torch.cat([ids.reshape(-1) for ids in (block.tail, block.head)]).abs()
            forms = graph.forms[derived[derived >= count].unique().numpy() - count]
            factors = units[np.unique(forms.nonzero()[1])]
            scales.unify(factors, torch.zeros_like(factors))
    merged = scales.solve()
    new = int(np.abs(merged).max())
    found = np.flatnonzero(merged)
    turn = csr_array(
        (np.sign(merged[found]), (found - 1, np.abs(merged[found]) - 1)),
        shape=(graph.num_units, new),
    )
    derived = new + 1 + torch.arange(graph.forms.shape[0])
    mapped = torch.cat([torch.from_numpy(merged), derived])

    def moved(ids: Tensor) -> Tensor:
        return mapped[ids.abs()] * ids.sign()

    joined = replace(
        graph,
        blocks=tuple(
            replace(block, tail=moved(block.tail), head=moved(block.head))
            for block in graph.blocks
            if block.name in names
        ),
        num_units=new,
        approximate=np.zeros(0, np.int64),
        exact=csr_array((new, 0), dtype=np.int64),
        forms=csr_array(graph.forms @ turn),
        statistics=tuple(replace(entry, units=moved(entry.units)) for entry in graph.statistics),
        beyond={
            name: (moved(tail), moved(head))
            for name, (tail, head) in graph.beyond.items()
            if name in names
        },
    )
    return joined, turn


__all__ = ["Sweep", "movable"]
