r"""Keep a network in its canonical gauge during training, one set of units at a time.

If its neighbours do not change, a unit is balanced exactly by ``phi += 1/4 log(L / E)``, with ``E``
the squares of entering and ``L`` of leaving weights; a unit of fixed norm is corrected by ``phi -=
1/2 mean log(E / target)``. Units form sets without weights between them, and every step of an
optimizer treats one set: it reads the weights at the set once, and multiplies them and their
buffers once. If there are weights between units of one set (recurrent layers), ``1/4`` is divided
by the largest number of scales at one weight: the sum of squares then still decreases, by the
inequality of arithmetic and geometric means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from pathspace.graph.structure import Structure

from .canonical_gauge import BALANCED, KEPT, Canonical, Side, incidence, sides

# a side, its factor, and that of its buffers, if they change
Moved = tuple[Side, Tensor, Tensor | None]
# a set has about 1 / PART of all weights, so that a step is cheap
PART = 8


@dataclass(frozen=True, eq=False)
class UnitSet:
    """Units that are treated together.

    Attributes:
        units: the units, counted from 0.
        summed: sides over which squares are summed.
        moved: these sides, then the running statistics that are rescaled with them.
        unit: for every pair of a unit and an entry, the position of the unit in ``units``.
        entry: the position of the entry.
        power: the power of the unit's scale by which the entry is multiplied.
        summed_pairs: number of the pairs that belong to ``summed``; they come first.
        balanced: mask of the units that are balanced.
        follows: whether a balanced unit is at an entry, for each of ``moved``.
        rate: the factor of ``log(L / E)``.
        voters: positions of the entries whose squares are compared with a target, and
            the groups of their sums.
        votes: positions of units, their groups, and the weights of the logarithms.
        target: target squares, by group.
    """

    units: Tensor
    summed: tuple[Side, ...]
    moved: tuple[Side, ...]
    unit: Tensor
    entry: Tensor
    power: Tensor
    summed_pairs: int
    balanced: Tensor
    follows: tuple[bool, ...]
    rate: float
    voters: tuple[Tensor, Tensor]
    votes: tuple[Tensor, Tensor, Tensor]
    target: Tensor

    def step(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, list[Moved]]:
        """The change of the units' log-scales, and the factors of all tensors at them.

        Buffers follow balanced units only. That a unit comes back to a fixed norm is not a change
        of coordinates but part of the step: first moments that followed would grow by ``1 / f``
        where the norm shrinks by ``f``, each time, and overflow where ``f^2`` is below their decay.

        Args:
            tensors: parameters by name.

        Returns:
            Changes, one for each of ``units``; sides with their factors and those that buffers
            follow, which are broadcastable to their tensors.
        """
        squares = torch.cat([side.squares(tensors[side.name]).reshape(-1) for side in self.summed])
        n, count = self.summed_pairs, len(self.units)
        power = self.power[:n]
        # sums of entering, then of leaving squares
        place = self.unit[:n] + count * (power < 0)
        both = squares.new_zeros(2 * count).index_add_(
            0, place, squares[self.entry[:n]] * power.abs()
        )
        entering, leaving = both[:count], both[count:]
        known = self.balanced & (entering > 0) & (leaving > 0)
        change = torch.where(known, self.rate * (leaving / entering).log(), 0.0)
        if len(self.target):
            voter, group = self.voters
            unit, deciding, weight = self.votes
            found = torch.zeros_like(self.target).index_add_(0, group, squares[voter])
            off = torch.where(found > 0, (found / self.target).log(), 0.0)
            change.index_add_(0, unit, weight * off[deciding])
        factors = self._factors(change)
        followed: list[Tensor | None] = [*factors]
        if len(self.target):
            # (where no unit is balanced, the factor would be 1: the buffers are not read at all)
            mine = torch.where(self.balanced, change, 0.0)
            balanced = self._factors(mine) if any(self.follows) else factors
            followed = [f if on else None for f, on in zip(balanced, self.follows, strict=True)]
        return change, list(zip(self.moved, factors, followed, strict=True))

    def _factors(self, change: Tensor) -> list[Tensor]:
        """The factor of each side, after changes of log-scales."""
        logs = change.new_zeros(sum(side.ids.numel() for side in self.moved))
        logs.index_add_(0, self.entry, self.power * change[self.unit])
        parts = logs.exp_().split([side.ids.numel() for side in self.moved])
        return [part.view(side.ids.shape) for side, part in zip(self.moved, parts, strict=True)]


def unit_sets(
    graph: Structure, found: Canonical, device: torch.device, norms: str
) -> list[UnitSet]:
    """Divide the units into independent sets.

    Args:
        graph: the reduction graph.
        found: its canonical representative.
        device: the device of the parameters.
        norms: as for :func:`pathspace.training.optim.canonical_gauge.canonical`.
    """
    every = sides(graph)
    pairs = incidence(graph, every)
    of_side = np.repeat(np.arange(len(every)), [side.ids.numel() for side in every])[pairs.entry]
    layer = _layers(graph.num_units, len(every), pairs.unit, of_side)
    layer[found.kinds == KEPT] = -1
    numel = {block.name: block.numel for block in graph.blocks}
    touched: dict[int, set[int]] = {}
    for unit, side in np.unique(np.stack([layer[pairs.unit], of_side]), axis=1).T.tolist():
        touched.setdefault(unit, set()).add(side)
    touched.pop(-1, None)
    sets = _color(touched, every, numel, bool(graph.forms.shape[0]))
    chosen = [np.flatnonzero(np.isin(layer, members)) for members in sets]
    runs = [
        (Side(name, entry.units, 1, None, graph.shifts.get(name, 0.0)), power)
        for entry in graph.statistics
        for name, power in ((entry.mean, 1), (entry.var, 2))
        if name is not None
    ]
    # each side with its power and its units, those of running statistics last
    ends = [
        (side, power, incidence(graph, [side]).unit)
        for side, power in [*((side, 1) for side in every), *runs]
    ]
    return [_make(graph, found, units, device, norms, every, ends) for units in chosen]


def _layers(units: int, count: int, unit: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Units at the same sides form a layer."""
    marks = np.random.default_rng(0).integers(1 << 62, size=count)
    once = np.unique(unit * count + side)
    total = np.zeros(units, np.int64)
    np.add.at(total, once // count, marks[once % count])
    return np.unique(total, return_inverse=True)[1].astype(np.int64)


def _color(
    touched: Mapping[int, set[int]], every: list[Side], numel: Mapping[str, int], products: bool
) -> list[list[int]]:
    """Sets of layers without a tensor between them and with a limited number of weights."""
    most = 2 * sum(numel[name] for name in {side.name for side in every}) / PART
    sets: list[tuple[list[int], set[tuple[str, int]], float]] = []
    for layer, own in touched.items():
        ends = {(every[side].name, every[side].sign) for side in own}
        against = {(name, -sign) for name, sign in ends} | (ends if products else set())
        size = sum(numel[name] for name, _ in ends)
        for i, (members, taken, weights) in enumerate(sets):
            if not against & taken and weights + size <= most:
                sets[i] = ([*members, layer], taken | ends, weights + size)
                break
        else:
            sets.append(([layer], ends, float(size)))
    return [members for members, _, _ in sets]


def _make(
    graph: Structure,
    found: Canonical,
    units: np.ndarray,
    device: torch.device,
    norms: str,
    every: list[Side],
    ends: Sequence[tuple[Side, int, np.ndarray]],
) -> UnitSet:
    inside = np.full(graph.num_units, -1)
    inside[units] = np.arange(len(units))
    met = [i for i, (_, _, own) in enumerate(ends) if (inside[own] >= 0).any()]
    numbers = [i for i in met if i < len(every)]
    summed, moved = [every[i] for i in numbers], [ends[i][0] for i in met]
    pairs = incidence(graph, moved)
    sizes = [side.ids.numel() for side in moved]
    times = np.repeat([ends[i][1] for i in met], sizes)
    here = inside[pairs.unit] >= 0
    unit, entry = inside[pairs.unit[here]], pairs.entry[here]
    power = (pairs.power * times[pairs.entry])[here]
    order = np.argsort(entry, kind="stable")
    unit, entry, power = unit[order], entry[order], power[order]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[len(summed)])
    balanced = found.kinds[units] == BALANCED
    followed = np.bincount(entry, balanced[unit], starts[-1])
    voter, group, voting, deciding, weight, target = _voters(
        graph, found, numbers, every, inside, starts, norms
    )

    def on(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(array, dtype=dtype, device=device)

    return UnitSet(
        on(units),
        tuple(summed),
        tuple(moved),
        on(unit),
        on(entry),
        on(power, torch.float64),
        int((entry < total).sum()),
        on(balanced, torch.bool),
        tuple(bool(some.any()) for some in np.split(followed, starts[1:-1])),
        1 / (4 * _width(summed, starts, entry, power)),
        (on(voter), on(group)),
        (on(voting), on(deciding), on(weight, torch.float64)),
        on(target, torch.float64),
    )


def _width(summed: list[Side], starts: np.ndarray, entry: np.ndarray, power: np.ndarray) -> float:
    """The largest number of scales of the set at one weight, counted with their powers."""
    widest: dict[str, float] = {}
    for i, side in enumerate(summed):
        some = (entry >= starts[i]) & (entry < starts[i + 1])
        sums = np.bincount(entry[some] - starts[i], np.abs(power[some]))
        widest[side.name] = widest.get(side.name, 0.0) + float(sums.max(initial=0.0))
    return max([1.0, *widest.values()])


def _voters(
    graph: Structure,
    found: Canonical,
    numbers: list[int],
    every: list[Side],
    inside: np.ndarray,
    starts: np.ndarray,
    norms: str,
) -> tuple[np.ndarray, ...]:
    """Entries that are compared with targets, and their units: the arrays
    ``voters`` and ``votes`` of a set.
    """
    owners = {number: np.abs(every[number].ids.reshape(-1).numpy()) - 1 for number in found.targets}
    count = np.zeros(graph.num_units)
    for number, target in found.targets.items():
        np.add.at(count, owners[number][target > 0], 1)
    parts: list[list[np.ndarray]] = [[np.zeros(0)] for _ in range(6)]
    groups = 0
    for place, number in enumerate(numbers):
        if number not in found.targets:
            continue
        target, owner = found.targets[number], owners[number]
        voting = np.flatnonzero(target > 0)
        mine = inside[owner[voting]] >= 0
        if not mine.any():
            continue
        # the norm of a tensor depends on all of it, also on units of other sets
        together = norms == "tensor"
        some = voting if together else voting[mine]
        group = np.zeros(len(some)) if together else np.arange(len(some))
        units = owner[voting[mine]]
        wanted = target[some].sum(keepdims=True) if together else target[some]
        for part, found_part in zip(
            parts,
            (
                starts[place] + some,
                groups + group,
                inside[units],
                groups + (group[mine] if together else group),
                -0.5 * found.kinds[units] / count[units],
                wanted,
            ),
            strict=True,
        ):
            part.append(found_part)
        groups += len(wanted)
    return tuple(np.concatenate(part) for part in parts)


def movable(graph: Structure, names: Collection[str]) -> tuple[Structure, csr_array]:
    """Merge units connected by a frozen weight, which is constant only if both
    ends have the same scale.

    Units that frozen weights connect to the root are fixed, and so are all factors of a
    product at a frozen weight.

    Args:
        graph: the reduction graph.
        names: the tensors that may change.

    Returns:
        The graph of these tensors over merged units; and the integer matrix ``(H, merged)`` from
        log-scales of merged units to those of units.

    Example:
        >>> import torch, pathspace as ps
        >>> layers = torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        >>> graph = ps.trace(torch.nn.Sequential(*layers), torch.randn(1, 2))
        >>> (
        ...     movable(graph, ["0.weight", "0.bias", "2.weight"])[0].num_units,
        ...     movable(graph, ["0.weight"])[0].num_units,
        ... )
        (3, 0)
    """
    count = graph.num_units + 1
    frozen = [block for block in graph.blocks if block.name not in names]
    starts, ends = [np.zeros(1, np.int64)], [np.full(1, count)]

    def node(ids: np.ndarray) -> np.ndarray:
        plain = np.where(np.abs(ids) < count, ids, 0)
        return np.where(plain < 0, count - plain, plain)

    for block in frozen:
        tail, head = (ids.numpy() for ids in torch.broadcast_tensors(block.tail, block.head))
        pairs = np.unique(np.stack([tail.reshape(-1), head.reshape(-1)]), axis=1)
        for sign in (1, -1):
            starts.append(node(sign * pairs[0]))
            ends.append(node(sign * pairs[1]))
        derived = np.unique(np.abs(pairs))
        for unit in graph.forms[derived[derived >= count] - count].nonzero()[1] + 1:
            starts.append(np.array([unit, unit + count]))
            ends.append(np.zeros(2, np.int64))
    first, last = np.concatenate(starts), np.concatenate(ends)
    links = coo_array((np.ones(len(first), bool), (first, last)), shape=(2 * count, 2 * count))
    label = np.asarray(connected_components(links, directed=False)[1])
    plus, minus = label[:count], label[count:]
    free = (plus != label[0]) & (plus != minus)
    groups, new = np.unique(np.minimum(plus, minus)[free], return_inverse=True)
    own = np.where(plus < minus, 1, -1)
    table = np.zeros(count + graph.forms.shape[0], np.int64)
    table[np.flatnonzero(free)] = (new + 1) * own[free]
    table[count:] = np.arange(graph.forms.shape[0]) + len(groups) + 1
    units = np.flatnonzero(free)
    turn = csr_array((own[free], (units - 1, new)), shape=(graph.num_units, len(groups)))
    mapped = torch.from_numpy(table)

    def moved(ids: Tensor) -> Tensor:
        return mapped[ids.abs()] * ids.sign()

    joined = replace(
        graph,
        blocks=tuple(
            replace(block, tail=moved(block.tail), head=moved(block.head))
            for block in graph.blocks
            if block.name in names
        ),
        num_units=len(groups),
        approximate=np.zeros(0, np.int64),
        exact=csr_array((len(groups), 0), dtype=np.int64),
        forms=csr_array(graph.forms @ turn),
        statistics=tuple(replace(entry, units=moved(entry.units)) for entry in graph.statistics),
        beyond={
            name: (moved(tail), moved(head))
            for name, (tail, head) in graph.beyond.items()
            if name in names
        },
    )
    return joined, turn


__all__ = ["UnitSet", "movable", "unit_sets"]
