"""The order of one model's channels that matches another model in another basis of its features."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from ..inference.sides import Side
from ..rotations.alignment import folded, solved
from ..rotations.rotate import BasisChange
from ..rotations.space import FeatureSpaces
from .groups import Slices


def orders_between_bases(
    one: nn.Module, two: nn.Module, spaces: FeatureSpaces, slices: Slices
) -> dict[str, Tensor]:
    """Orders of the second model's channels, group by group.

    The matrices of some spaces follow from weights that no order touches (those of the stream from
    the tables at both ends). In that basis, channels are compared by the spaces that their weights
    span, which no matrix inside a channel changes: ``|Q_a^T Q_b|^2`` with orthonormal bases.
    """
    slices = {name: sides for name, sides in slices.items() if not _is_mixed(spaces, sides)}
    # parameter -> what moves its numbers: spaces, or orders (without a name), along dimensions
    movers: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for name, dim in (side for sides in slices.values() for side in sides):
        movers[name].add(("", dim))
    for space in spaces.free:
        for part in space.slices:
            movers[part.parameter].add((space.name, part.dim))
    a, b = folded(one, spaces), folded(two, spaces)
    known: dict[str, Tensor] = {}
    for space in spaces.free:
        alone = [each for each in space.slices if len(movers[each.parameter]) == 1]
        if alone:
            known[space.name] = solved(space, spaces, alone, {}, a, b)
    change = BasisChange(spaces, known, a.__getitem__)
    orders = {}
    for group, sides in slices.items():
        count = len(next(iter(sides.values())))
        like = torch.zeros(count, count, dtype=torch.float64)
        for (key, dim), where in sides.items():
            if key in a and all(own == dim or name in known for name, own in movers[key]):
                first = change.turned(key) if key in change.names else a[key]
                like += _alike(first.movedim(dim, 0)[where], b[key].movedim(dim, 0)[where])
        if like.any():
            orders[group] = torch.from_numpy(linear_sum_assignment(like, maximize=True)[1])
    return orders


def _is_mixed(spaces: FeatureSpaces, sides: Mapping[Side, Tensor]) -> bool:
    """Whether a matrix mixes the channels of a group with each other."""
    return any(
        where.shape[1] < space.size and (part.parameter, part.dim) == side
        for space in spaces.free
        for part in space.slices
        for side, where in sides.items()
    )


def _alike(one: Tensor, two: Tensor) -> Tensor:
    """How far the rows of each channel span the same space; ``(channels, channels)``."""
    bases = [rows.reshape(*rows.shape[:2], -1).mT for rows in (one, two)]
    if bases[0].shape[1] <= bases[0].shape[2]:
        # (they span everything)
        return torch.zeros(len(one), len(one), dtype=torch.float64)
    a, b = (torch.linalg.qr(basis)[0] for basis in bases)
    return torch.einsum("arm,brk->abmk", a, b).square().sum((2, 3))
