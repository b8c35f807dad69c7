"""The order of one model's channels that matches another model in another basis of its features."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from ..inference.sides import Side
from ..rotations.alignment import folded, solved
from ..rotations.rotate import BasisChange
from ..rotations.space import FeatureSlice, FeatureSpaces, Space
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
    moving = {side for sides in slices.values() for side in sides}
    a, b = folded(one, spaces), folded(two, spaces)
    known: dict[str, Tensor] = {}
    for space in spaces.free:
        some = [part for part in space.slices if _is_alone(part, space, spaces, moving)]
        if some:
            known[space.name] = solved(space, spaces, some, {}, a, b)
    change = BasisChange(spaces, known, a.__getitem__)
    unknown = {
        (part.parameter, part.dim)
        for space in spaces.free
        if space.name not in known
        for part in space.slices
    }
    orders = {}
    for name, sides in slices.items():
        count = len(next(iter(sides.values())))
        like = torch.zeros(count, count, dtype=torch.float64)
        for (key, dim), where in sides.items():
            if key in a and not any(own[0] == key and own[1] != dim for own in moving | unknown):
                first = change.turned(key) if key in change.names else a[key]
                like += _alike(first.movedim(dim, 0)[where], b[key].movedim(dim, 0)[where])
        if like.any():
            orders[name] = torch.from_numpy(linear_sum_assignment(like, maximize=True)[1])
    return orders


def _is_mixed(spaces: FeatureSpaces, sides: Mapping[Side, Tensor]) -> bool:
    """Whether a matrix mixes the channels of a group with each other."""
    return any(
        where.shape[1] < space.size and (part.parameter, part.dim) == side
        for space in spaces.free
        for part in space.slices
        for side, where in sides.items()
    )


def _is_alone(part: FeatureSlice, space: Space, spaces: FeatureSpaces, moving: set[Side]) -> bool:
    """Whether nothing else moves the numbers of a parameter."""
    others = (
        own
        for other in spaces.free
        for own in other.slices
        if other is not space or own.dim != part.dim
    )
    return not any(own.parameter == part.parameter for own in others) and not any(
        name == part.parameter for name, _ in moving
    )


def _alike(one: Tensor, two: Tensor) -> Tensor:
    """How far the rows of each channel span the same space; ``(channels, channels)``."""
    bases = [rows.reshape(*rows.shape[:2], -1).mT for rows in (one, two)]
    if bases[0].shape[1] <= bases[0].shape[2]:
        # (they span everything)
        return torch.zeros(len(one), len(one), dtype=torch.float64)
    a, b = (torch.linalg.qr(basis)[0] for basis in bases)
    return torch.einsum("arm,brk->abmk", a, b).square().sum((2, 3))
