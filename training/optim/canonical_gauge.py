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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
        dims = [
            d
            for d, (n, size) in enumerate(zip(self.ids.shape, value.shape, strict=True))
            if n == 1 < size
        ]
        # in float32 at least, because scales would inherit rounding errors
        found = value.to(torch.promote_types(value.dtype, torch.float32)).square()
        return (found.sum(dims, keepdim=True) if dims else found).double()


def sides(graph: Structure) -> list[Side]:
    """All sides of tensors with units."""
    result = []
    for block in graph.blocks:
        tail, head = graph.beyond.get(block.name, (block.tail, block.head))
        for ids, sign in ((head, 1), (tail, -1)):
            if bool(ids.any()):
                result.append(Side(block.name, ids, sign, block.unused, block.shift))
    return result


@dataclass(frozen=True, eq=False)
class Incidence:
    """The units of the entries of some sides.

    Attributes:
        unit: units, counted from 0.
        entry: position in the concatenation of all entries.
        power: power of the unit's scale by which a rescaling multiplies the weights of the entry.
    """

    unit: np.ndarray
    entry: np.ndarray
    power: np.ndarray


def incidence(graph: Structure, chosen: list[Side]) -> Incidence:
    """The incidence of units and entries."""
    ids = np.concatenate(
        [np.zeros(0, np.int64), *(side.ids.reshape(-1).numpy() for side in chosen)]
    )
    signs = np.concatenate(
        [np.zeros(0, np.int64), *(np.full(side.ids.numel(), side.sign) for side in chosen)]
    )
    found = csr_array(graph.expand[:, 1:])[np.abs(ids)].tocoo()
    entry, unit = found.coords
    return Incidence(unit, entry, found.data * np.sign(ids[entry]) * signs[entry])


@dataclass(frozen=True, eq=False)
class Canonical:
    """The canonical representative.

    Attributes:
        kinds: the kind of every unit: balanced, fixed norm of the entering or of the
            leaving weights, or unchanged.
        phi: log-scales from the current to the canonical gauge, ``(H,)``.
        targets: side (position in :func:`sides`) -> target squares of its entries, 0 for
            entries that are not used.
    """

    kinds: np.ndarray
    phi: np.ndarray
    targets: Mapping[int, np.ndarray]


def nominal(side: Side, shape: tuple[int, ...]) -> Tensor:
    """Expected squares of an entry under torch's default initialisation: ``1 / (3
    inputs)`` for each weight.

    For tensors of one dimension (gains, biases) it is 1 for each scalar.
    """
    edges = torch.ones((), dtype=torch.float64).expand(shape)
    count = Side(side.name, side.ids, side.sign, side.unused, 0.0).squares(edges)
    inputs = int(np.prod(shape[1:], dtype=np.int64))
    return count / (3 * inputs) if len(shape) > 1 else count


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
    chosen = sides(graph)
    within = _heads_of_groups(chosen, tensors, kinds, found.groups)
    fresh = np.ones(graph.num_units)
    # (balanced units pass sums of squares on: those of both ends of a network cannot
    # be chosen independently)
    if not (kinds == LEFT).any():
        fresh[found.reasons.get(ZEROS_LEAVE, np.zeros(0, np.int64)) - 1] = FRESH
    votes = _votes(graph, chosen, tensors, kinds, norms, within, fresh)
    free = kinds != KEPT
    held = np.isin(kinds, (ENTERED, LEFT))
    kinds[held & (votes.count == 0)] = KEPT
    held, free = np.isin(kinds, (ENTERED, LEFT)), kinds != KEPT
    tilt = np.where(held, kinds * np.maximum(votes.expected, 1e-300), 0.0)
    phi, worst = np.zeros(graph.num_units), np.inf
    for _ in range(ROUNDS):
        phi, before = minimise(pairs, free, tilt, TOLERANCE, phi).phi, worst
        off = votes.deviation(phi)
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
    return Canonical(kinds, phi, votes.targets)


class _Votes:
    """The deviation of units with a fixed norm from their targets, averaged over tensors."""

    def __init__(
        self, graph: Structure, chosen: list[Side], tensors: Mapping[str, Tensor], norms: str
    ) -> None:
        self.graph, self.sides, self.norms = graph, chosen, norms
        self.tensors = {
            side.name: tensors[side.name].detach().double().cpu() + graph.shifts.get(side.name, 0.0)
            for side in chosen
        }
        self.targets: dict[int, np.ndarray] = {}
        self.unit: dict[int, np.ndarray] = {}
        self.count, self.expected = np.zeros(graph.num_units), np.zeros(graph.num_units)

    def squares(self, number: int, phi: np.ndarray) -> np.ndarray:
        """Squares of the entries of a side after a rescaling."""
        side = self.sides[number]
        value = self.tensors[side.name]
        logs = torch.from_numpy(self.graph.expand @ np.concatenate([[0.0], phi]))
        for other in self.sides:
            if other.name == side.name:
                value = value * (logs[other.ids.abs()] * other.ids.sign() * other.sign).exp()
        return (
            Side(side.name, side.ids, side.sign, side.unused, 0.0)
            .squares(value)
            .reshape(-1)
            .numpy()
        )

    def deviation(self, phi: np.ndarray) -> np.ndarray:
        """Mean of ``log(squares / target)`` for every unit."""
        total = np.zeros(self.graph.num_units)
        for number, target in self.targets.items():
            some = target > 0
            found, wanted = self.squares(number, phi)[some], target[some]
            if self.norms == "tensor":
                found, wanted = np.full_like(found, found.sum()), np.full_like(wanted, wanted.sum())
            np.add.at(total, self.unit[number][some], np.log(found / wanted))
        return total / np.maximum(self.count, 1)


def _heads_of_groups(
    chosen: list[Side],
    tensors: Mapping[str, Tensor],
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
    for kept, (sign, members) in groups.items():
        near = [side for side in chosen if np.isin(side.ids.abs().numpy() - 1, members).any()]
        ends = {(side.name, side.sign) for side in near}
        within = {name for name, own in ends if (name, -own) in ends}
        found = [np.zeros(0, np.int64)]
        for side in near:
            if side.name not in within:
                units = side.sign * sign * side.ids.reshape(-1).numpy() - 1
                squares = side.squares(tensors[side.name].detach()).reshape(-1).cpu().numpy()
                found.append(units[(squares > 0) & np.isin(units, members)])
        heads = np.concatenate(found)
        if len(heads):
            kinds[kept], kinds[heads.min()] = BALANCED, sign
            inside[int(heads.min())] = within
    return inside


def _votes(
    graph: Structure,
    chosen: list[Side],
    tensors: Mapping[str, Tensor],
    kinds: np.ndarray,
    norms: str,
    within: Mapping[int, set[str]],
    fresh: np.ndarray,
) -> _Votes:
    """The sides that determine a unit's norm: those of matrices, or if all of these
    are 0, the largest vector.

    Nominal squares are multiplied by ``fresh``, one number for each unit.
    """
    result = _Votes(graph, chosen, tensors, norms)
    zero = np.zeros(graph.num_units)
    for vectors in (False, True):
        lacking = (result.count == 0) & np.isin(kinds, (ENTERED, LEFT))
        most = np.zeros(graph.num_units)
        able: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for number, side in enumerate(chosen):
            if (result.tensors[side.name].dim() < 2) is not vectors:
                continue
            ids = side.ids.reshape(-1).numpy()
            unit = np.where(np.abs(ids) <= graph.num_units, np.abs(ids), 0) - 1
            squares = result.squares(number, zero)
            some = (
                (unit >= 0)
                & lacking[unit]
                & (kinds[unit] == np.sign(ids) * side.sign)
                & (squares > 0)
            )
            some &= ~np.isin(unit, [head for head, names in within.items() if side.name in names])
            np.maximum.at(most, unit[some], squares[some])
            able[number] = unit, squares, some
        for number, (unit, squares, some) in able.items():
            if vectors:
                some = some & (squares == most[unit])
            if some.any():
                side = chosen[number]
                shape = tuple(result.tensors[side.name].shape)
                wanted = (
                    squares
                    if norms == "initial"
                    else nominal(side, shape).reshape(-1).numpy() * fresh[unit]
                )
                result.targets[number] = np.where(some, wanted, 0.0)
                result.unit[number] = unit
                np.add.at(result.count, unit[some], 1)
                np.add.at(result.expected, unit[some], wanted[some])
    return result


__all__ = [
    "BALANCED",
    "ENTERED",
    "KEPT",
    "LEFT",
    "NORMS",
    "Canonical",
    "Incidence",
    "Side",
    "canonical",
    "incidence",
]
__all__ += ["nominal", "sides"]
