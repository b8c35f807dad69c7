r"""One representative of every orbit of the gauge: balanced units, and fixed norms for
units that cannot be balanced.

With ``E_k`` the sum of squares of the weights that enter a unit and ``L_k`` of those that leave
it, a canonical network has

* ``E_k = L_k`` for every unit with both sides;
* ``mean over tensors of log(E_k / target) = 0``, over tensors with two or more dimensions, for a
  unit without leaving weights (a normalisation follows, whose output does not depend on the scale)
  or with leaving weights that are all 0 (as in a fresh adapter); the target of the latter is
  ``FRESH`` times as large, if there are no units of the next kind;
* the same with ``L_k`` for a unit without entering weights.

For given ``E_k`` of the second kind this is the minimum of ``sum_e w_e^2 exp(2 (A phi)_e) - 2 c .
phi``, a convex programme; an outer loop finds the ``c`` for the targets.

During training a sweep over all units, now and then, keeps the gauge. If its neighbours do not
change, a unit is balanced exactly by ``phi += 1/4 log(L / E)``; a unit of fixed norm is corrected
by ``phi -= 1/2 mean log(E / target)``. A sweep changes all units at once, balanced ones by this
much over the largest number of scales at one weight: the sum of squares then still decreases, by
the inequality of arithmetic and geometric means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from pathspace.errors import InputError
from pathspace.gauge.attained import (
    ALL_ZERO,
    NOTHING_ENTERS,
    NOTHING_LEAVES,
    ZEROS_ENTER,
    ZEROS_LEAVE,
    attained,
)
from pathspace.gauge.pairs import Pairs
from pathspace.gauge.programme import minimise
from pathspace.graph.structure import Structure

NONE = np.zeros(0, np.int64)
NORMS = ("unit", "tensor", "initial")
BALANCED, ENTERED, LEFT, KEPT = 0, 1, -1, 2
_KINDS = {
    NOTHING_LEAVES: ENTERED,
    ZEROS_LEAVE: ENTERED,
    NOTHING_ENTERS: LEFT,
    ZEROS_ENTER: LEFT,
    ALL_ZERO: KEPT,
}
# Weights that start at 0 need larger steps of Adam than those before them: by 16, says
# LoRA+. Steps of one rate have this effect where the weights before them are 4 times as
# large, and their squares 16 times.
FRESH = 16.0
ROUNDS = 100
# tolerance of the solution, about the rounding error
TOLERANCE = 1e-13
ROUNDED = 1e-11
ENOUGH = 1e-9
# a sweep reads and writes all weights, so that not every step has one
EVERY = 3


@dataclass(frozen=True, eq=False)
class Side:
    """One end of the edges of a tensor, with one sum of squares for every entry.

    Attributes:
        name: the tensor.
        ids: heads or tails, broadcastable to the tensor; sums go over the dimensions of size 1.
        sign: 1 for heads, -1 for tails.
        unused: scalars that are not edges.
        shift: the constant that the model adds to the tensor.
    """

    name: str
    ids: Tensor
    sign: int
    unused: Tensor | None
    shift: float

    def squares(self, tensor: Tensor) -> Tensor:
        """Sums of squares over the edges of each entry of ``ids``, in its shape."""
        value = tensor + self.shift if self.shift else tensor
        if self.unused is not None:
            value = value.masked_fill(self.unused.to(value.device), 0)
        # in float32 at least, because scales would inherit rounding errors
        found = value.to(torch.promote_types(value.dtype, torch.float32)).square()
        # (a sum over dimensions with others between them takes five times as long)
        for d, size in enumerate(self.ids.shape):
            found = found.sum(d, keepdim=True) if size == 1 < found.shape[d] else found
        return found.double()


def sides(graph: Structure) -> list[Side]:
    """All sides of tensors with units."""
    result = []
    for block in graph.blocks:
        tail, head = graph.beyond.get(block.name, (block.tail, block.head))
        for ids, sign in ((head, 1), (tail, -1)):
            if bool(ids.any()):
                result.append(Side(block.name, ids, sign, block.unused, block.shift))
    return result


def incidence(
    graph: Structure, chosen: Sequence[Side]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The units of the entries of some sides.

    Returns:
        Units, counted from 0; the position of the entry of each, in the order of all entries; and
        the power of the unit's scale by which a rescaling multiplies the weights there.
    """
    ids = np.concatenate([NONE, *(side.ids.reshape(-1).numpy() for side in chosen)])
    signs = np.concatenate([NONE, *(np.full(side.ids.numel(), side.sign) for side in chosen)])
    found = csr_array(graph.expand[:, 1:])[np.abs(ids)].tocoo()
    entry, unit = found.coords
    return unit, entry, found.data * np.sign(ids[entry]) * signs[entry]


def entries(graph: Structure) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The side of every entry of all sides, its own unit (from 0; -1: none, or a product), and the
    power of that unit's scale.
    """
    chosen = sides(graph)
    of_side = np.repeat(np.arange(len(chosen)), [side.ids.numel() for side in chosen])
    ids = np.concatenate([NONE, *((s.ids * s.sign).reshape(-1).numpy() for s in chosen)])
    ids = np.where(np.abs(ids) <= graph.num_units, ids, 0)
    return of_side, np.abs(ids) - 1, np.sign(ids)


@dataclass(frozen=True, eq=False)
class Canonical:
    """The canonical representative.

    Attributes:
        kinds: the kind of every unit: balanced, fixed norm of the entering or of the
            leaving weights, or unchanged.
        phi: log-scales from the current to the canonical gauge, ``(H,)``.
        targets: target squares of the entries of all :func:`sides`, one side after the other; 0
            for those that decide on no norm.
    """

    kinds: np.ndarray
    phi: np.ndarray
    targets: np.ndarray


# a side, its factor, and that of its buffers, if they change
Moved = tuple[Side, Tensor, Tensor | None]


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
        # sums of entering squares, then of leaving ones
        n, count = int((of_side < len(weights)).sum()), graph.num_units
        self._place, self._summand = on((unit + count * (power < 0))[:n]), on(entry[:n])
        self._times = on(abs(power[:n]), torch.float64)
        self._balanced = on(balanced, torch.bool)
        self._rate = on(np.where(balanced, 1 / width, alone), torch.float64)
        self._kinds = on(found.kinds, torch.float64)
        # entries that decide on fixed norms: each by itself, or those of a tensor by their sum
        voter = np.flatnonzero(found.targets)
        of_entry, own, _ = entries(graph)
        voted, group = own[voter], np.arange(len(voter))
        if norms == "tensor":
            group = np.unique(of_entry[voter], return_inverse=True)[1]
        share = 1 / np.bincount(voted, minlength=graph.num_units)[voted]
        self._voter, self._voted, self._group = on(voter), on(voted), on(group)
        self._share = on(share, torch.float64)
        self._target = on(np.bincount(group, found.targets[voter]), torch.float64)

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
        sums = squares.new_zeros(2 * len(self._rate))
        sums.index_add_(0, self._place, squares[self._summand] * self._times)
        entering, leaving = sums.view(2, -1)
        known = self._balanced & (entering > 0) & (leaving > 0)
        change = even = torch.where(known, self._rate / 4 * (leaving / entering).log(), 0.0)
        if len(self._voter):
            change = even - self._rate / 2 * self._kinds * self.deviation(squares)
        factors = self._factors(change)
        followed = factors if change is even else self._factors(even)
        return change, [
            (side, factor, mine if follows else None)
            for side, factor, mine, follows in zip(
                self.sides, factors, followed, self.follows, strict=True
            )
        ]

    def deviation(self, squares: Tensor) -> Tensor:
        """Mean of ``log(squares / target)`` for every unit."""
        found = torch.zeros_like(self._target).index_add_(0, self._group, squares[self._voter])
        off = torch.where(found > 0, (found / self._target).log(), 0.0)
        none = self._rate.new_zeros(len(self._rate))
        return none.index_add_(0, self._voted, self._share * off[self._group])

    def _factors(self, change: Tensor) -> list[Tensor]:
        """The factor of each side, after changes of log-scales."""
        logs = change.new_zeros(sum(self._sizes))
        logs.index_add_(0, self._entry, self._power * change[self._unit])
        parts = logs.exp_().split(self._sizes)
        return [part.view(side.ids.shape) for side, part in zip(self.sides, parts, strict=True)]


def _nominal(graph: Structure, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Expected squares of all entries under torch's default initialisation: ``1 / (3 inputs)`` for
    each weight.

    For tensors of one dimension (gains, biases) it is 1 for each scalar.
    """
    parts = [np.zeros(0)]
    for side in sides(graph):
        shape = tuple(tensors[side.name].shape)
        edges = torch.ones((), dtype=torch.float64).expand(shape)
        count = replace(side, shift=0.0).squares(edges).reshape(-1).numpy()
        parts.append(count / (3 * int(np.prod(shape[1:]))) if len(shape) > 1 else count)
    return np.concatenate(parts)


def canonical(graph: Structure, tensors: Mapping[str, Tensor], norms: str = "unit") -> Canonical:
    """Find the canonical representative of a network's orbit, without changing the network.

    Args:
        graph: the reduction graph.
        tensors: its parameters by name.
        norms: the fixed norms of units that cannot be balanced: ``unit``, the norm of every unit
            under torch's default initialisation, 4 times this norm before weights that are all 0;
            ``tensor``, that of every tensor; ``initial``, the current norm of every unit.

    Raises:
        InputError: weights are not finite, ``norms`` is unknown, or no solution is found.
    """
    if norms not in NORMS:
        raise InputError(f"GaugeFixed found norms={norms!r}, expected one of {', '.join(NORMS)}.")
    pairs = Pairs(graph, 2.0, tensors)
    if not np.isfinite(pairs.sides(np.zeros(graph.num_units))[2]):
        raise InputError(
            "GaugeFixed found weights that are not finite; load weights from before they diverged."
        )
    found = attained(pairs)
    kinds = np.full(graph.num_units, BALANCED)
    for reason, units in found.reasons.items():
        kinds[units - 1] = _KINDS.get(reason, KEPT)
    fresh = np.ones(graph.num_units)
    # (balanced units pass sums of squares on: those of both ends of a network cannot
    # be chosen independently)
    every = np.ones(len(entries(graph)[0]))
    squares = _squares(graph, tensors, every, np.zeros(graph.num_units)).numpy()
    within = _heads_of_groups(graph, squares, kinds, found.groups)
    if not (kinds == LEFT).any():
        fresh[found.reasons.get(ZEROS_LEAVE, np.zeros(0, np.int64)) - 1] = FRESH
    targets = _targets(graph, squares, kinds, within)
    if norms != "initial":
        targets = np.where(targets > 0, _nominal(graph, tensors) * fresh[entries(graph)[1]], 0.0)
    wanted, own = targets > 0, entries(graph)[1]
    expected = np.bincount(own[wanted], targets[wanted], graph.num_units)
    kinds[np.isin(kinds, (ENTERED, LEFT)) & (expected == 0)] = KEPT
    held, free = np.isin(kinds, (ENTERED, LEFT)), kinds != KEPT
    tilt = np.where(held, kinds * np.maximum(expected, 1e-300), 0.0)
    phi, worst = np.zeros(graph.num_units), np.inf
    sweep = Sweep(graph, Canonical(kinds, phi, targets), torch.device("cpu"), norms)
    for _ in range(ROUNDS):
        phi, before = minimise(pairs, free, tilt, TOLERANCE, phi).phi, worst
        off = sweep.deviation(_squares(graph, tensors, targets, phi)).numpy()
        worst = float(np.abs(off).max(initial=0.0))
        # (sums of many squares may be rounded by more than the tolerance, in all further rounds)
        if worst <= TOLERANCE or 0.9 * before < worst <= ROUNDED:
            break
        tilt = tilt * np.exp(-off)
    if worst > ENOUGH:
        raise InputError(
            f"GaugeFixed found norms that differ from those wanted by {worst:.0e} after {ROUNDS}"
            " rounds; start from weights that are not zero."
        )
    return Canonical(kinds, phi, targets)


def _squares(
    graph: Structure, tensors: Mapping[str, Tensor], wanted: np.ndarray, phi: np.ndarray
) -> Tensor:
    """Squares of the entries of all sides after a rescaling, 0 for sides where none is wanted."""
    factors = graph.gauge_factors(torch.from_numpy(phi))
    parts, start = [torch.zeros(0, dtype=torch.float64)], 0
    for side in sides(graph):
        count = side.ids.numel()
        if not wanted[start : start + count].any():
            parts.append(torch.zeros(count, dtype=torch.float64))
        else:
            head, tail = factors[side.name]
            value = (tensors[side.name].detach().double().cpu() + side.shift) * head / tail
            parts.append(replace(side, shift=0.0).squares(value).reshape(-1))
        start += count
    return torch.cat(parts)


def _heads_of_groups(
    graph: Structure,
    squares: np.ndarray,
    kinds: np.ndarray,
    groups: Mapping[int, tuple[int, np.ndarray]],
) -> dict[int, set[str]]:
    """Give one unit a fixed norm in every group of units that weights only enter, or only leave.

    It is the first unit with such weights that are not all 0; all others can then be balanced. (A
    residual branch before a norm is such a group.)

    Returns:
        Unit -> the tensors inside its group, which do not depend on the scale of the group.
    """
    inside: dict[int, set[str]] = {}
    chosen, (of_side, unit, power) = sides(graph), entries(graph)
    for kept, (sign, members) in groups.items():
        near = np.isin(unit, members)
        ends = {(chosen[number].name, chosen[number].sign) for number in of_side[near].tolist()}
        within = {name for name, own in ends if (name, -own) in ends}
        outer = np.array([side.name not in within for side in chosen], bool)[of_side]
        heads = unit[near & outer & (power == sign) & (squares > 0)]
        if len(heads):
            kinds[kept], kinds[heads.min()] = BALANCED, sign
            inside[int(heads.min())] = within
    return inside


def _targets(
    graph: Structure,
    squares: np.ndarray,
    kinds: np.ndarray,
    within: Mapping[int, set[str]],
) -> np.ndarray:
    """Squares of the entries that determine a unit's norm, 0 for others: those of matrices, or if
    all of these are 0, the largest of vectors.
    """
    chosen, (of_side, unit, power) = sides(graph), entries(graph)
    vector = np.array([graph.blocks[graph.index[s.name]].shape[1:] == () for s in chosen], bool)
    vector = vector[of_side]
    able = (unit >= 0) & (kinds[unit] == power) & (squares > 0)
    for head, names in within.items():
        able &= (unit != head) | np.array([s.name not in names for s in chosen], bool)[of_side]
    lacking = ~np.isin(unit, unit[able & ~vector])
    most = np.zeros(graph.num_units)
    np.maximum.at(most, unit[able & lacking], squares[able & lacking])
    return np.where(able & (~vector | lacking & (squares == most[unit])), squares, 0.0)
