"""The change of basis between two models that are equal up to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from scipy.linalg import solve_sylvester
from torch import Tensor, nn

from ..errors import InputError
from ..models.finite import check_finite
from ..models.values import require_runnable
from ..models.walk import every_tensor
from ..shown import Shown
from .elements import turn_of
from .rotate import BasisChange, rotate_
from .space import FeatureSlice, FeatureSpaces, Space

# largest relative difference of weights that counts as rounding
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
# rounds in which each matrix is estimated from those of its neighbours
ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Alignment(Shown):
    """A change of basis that takes one model as near to another as it can.

    Attributes:
        elements: name of a space -> its matrices, for :func:`pathspace.rotate_`.
        distance: largest difference of a parameter afterwards, with gains folded in both, relative
            to its norm.
        worst: the parameter with this difference.
        equal: whether the models are equal up to the change of basis, and rounding.
    """

    elements: Mapping[str, Tensor] = field(repr=False)
    distance: float
    worst: str
    equal: bool


def find_rotation(model: nn.Module, other: nn.Module, spaces: FeatureSpaces) -> Alignment:
    """Find the change of basis that takes one model to another.

    Gains are folded in copies of both. Then each matrix is the least-squares solution of
    ``W' = A W`` for its writers and ``W' = W A^-1`` for its readers, given the matrices of the
    other spaces there: a Procrustes problem for orthogonal groups, a Sylvester equation for others.

    Args:
        model: the model of the spaces.
        other: a model of the same class.
        spaces: from :func:`pathspace.spaces`.

    Returns:
        The matrices, and how near they bring the model.

    Raises:
        InputError: the models have different parameters, or some without finite numbers.

    Example:
        >>> import torch, pathspace as ps
        >>> from copy import deepcopy
        >>> model, x = (
        ...     torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.Linear(4, 9)),
        ...     torch.ones(9),
        ... )
        >>> spaces = ps.spaces(model, x)
        >>> other = ps.rotate_(deepcopy(model), spaces, "random")
        >>> ps.find_rotation(model, other, spaces).equal
        True
    """
    shapes = [
        {n: tuple(p.shape) for n, p in every_tensor(each, "_parameters").items()}
        for each in (model, other)
    ]
    if shapes[0] != shapes[1]:
        name = next(n for n in {**shapes[0], **shapes[1]} if shapes[0].get(n) != shapes[1].get(n))
        raise InputError(
            f"find_rotation found {name!r} of shape {shapes[0].get(name)} and"
            f" {shapes[1].get(name)}, expected two models of one architecture."
        )
    for each in (model, other):
        require_runnable("find_rotation", every_tensor(each, "_parameters").items())
        check_finite(each, ())
    one, two = (folded(each, spaces) for each in (model, other))
    found: dict[str, Tensor] = {}
    for number in range(ROUNDS):
        for space in _in_order(spaces):
            known = {name: matrix for name, matrix in found.items() if name != space.name}
            # (in the first round, weights with a space that is not known yet say nothing)
            parts = [
                part
                for part in space.slices
                if number or all(o.name in known for o in _others(spaces, space, part))
            ]
            found[space.name] = solved(space, spaces, parts or space.slices, known, one, two)
    change = BasisChange(spaces, found, one.__getitem__)
    distances = {
        name: float((change.turned(name) - new).norm() / new.norm().clamp_min(1e-30))
        for name, new in two.items()
        if name in change.names
    }
    worst = max(distances, key=distances.__getitem__, default="")
    kind = next(iter(model.parameters())).dtype
    limit = TOLERANCE.get(kind, TOLERANCE[torch.float32])
    rest = [name for name in two if name not in distances]
    same = all(torch.allclose(one[name], two[name], rtol=limit, atol=limit) for name in rest)
    largest = distances.get(worst, 0.0)
    return Alignment(found, largest, worst, same and largest <= limit)


def folded(model: nn.Module, spaces: FeatureSpaces) -> dict[str, Tensor]:
    """Parameters of a copy with folded gains, in float64."""
    twin = deepcopy(model).double()
    still = {space.name: torch.eye(space.size).double() for space in spaces.free}
    rotate_(twin, spaces, still)
    return {
        name: parameter.detach() for name, parameter in every_tensor(twin, "_parameters").items()
    }


def _in_order(spaces: FeatureSpaces) -> list[Space]:
    """Those with weights to rigid spaces first, because their matrices need no others."""
    waiting, known, order = list(spaces.free), set[str](), []
    while waiting:
        ready = next(
            (
                space
                for space in waiting
                if any(
                    all(other.name in known for other in _others(spaces, space, part))
                    for part in space.slices
                )
            ),
            waiting[0],
        )
        waiting.remove(ready)
        known.add(ready.name)
        order.append(ready)
    return order


def _others(spaces: FeatureSpaces, space: Space, part: FeatureSlice) -> list[Space]:
    """The other free spaces of a parameter."""
    return [
        other
        for other in spaces.free
        if other is not space and any(own.parameter == part.parameter for own in other.slices)
    ]


def solved(
    space: Space,
    spaces: FeatureSpaces,
    parts: Sequence[FeatureSlice],
    known: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    two: Mapping[str, Tensor],
) -> Tensor:
    """The matrices of a space, given those of others."""
    size = space.size
    left = torch.zeros(space.count, size, size, dtype=torch.float64)
    right, product = left.clone(), left.clone()
    change = BasisChange(spaces, known, one.__getitem__)
    for part in parts:
        at = part.positions.reshape(-1)
        old, new = (
            tensor.movedim(part.dim, 0)[at].reshape(space.count, size, -1)
            for tensor in (change.turned(part.parameter), two[part.parameter])
        )
        product += new @ old.mT
        if part.dual:
            left += new @ new.mT
        else:
            right += old @ old.mT
    if space.keeps_length:
        return _nearest(space, product)
    matrices = [
        torch.from_numpy(solve_sylvester(*(each.numpy() for each in triple)))
        for triple in zip(left, right, product, strict=True)
    ]
    found = torch.stack(matrices)
    if space.group == "complex":
        turn = turn_of(space)
        found = (found - turn @ found @ turn) / 2
    return found


def _nearest(space: Space, product: Tensor) -> Tensor:
    """The element of an orthogonal group with the largest inner product."""
    if space.group == "O1":
        ones = torch.full((space.size, space.size), 1 / space.size, dtype=torch.float64)
        inner = torch.eye(space.size, dtype=torch.float64) - ones
        product = inner @ product @ inner + ones * product.abs().max().clamp_min(1.0)
    if space.group == "unitary":
        turn = turn_of(space)
        product = product - turn @ product @ turn
    u, _, v = torch.linalg.svd(product)
    nearest: Tensor = u @ v
    return nearest
