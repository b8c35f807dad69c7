"""Which positions of a tensor belong together: labels that broadcast to its ids."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..inference.sides import varying
from ..inference.values import NEUTRAL, ROOT, distinct, value_of


def narrowed(tensor: Tensor, along: set[int]) -> Tensor:
    """The first position along all other dimensions."""
    for dim in range(tensor.dim()):
        tensor = tensor if dim in along else tensor.narrow(dim, 0, 1)
    return tensor


def numbered(shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """A number for every position along some dimensions."""
    sizes = [shape[dim] if dim in dims else 1 for dim in range(len(shape))]
    return torch.arange(prod(sizes)).reshape(sizes)


def equal_factors(value: Tensor, by: Tensor, along: set[int], wide: Sequence[int]) -> Tensor:
    """Equal for features that have equal factors: known ones by value, others by position."""
    small, known = distinct(value), value_of(by)
    if known is None:
        return numbered(small.shape, wide)
    known = known.reshape([1] * (value.dim() - known.dim()) + list(known.shape))
    own = sorted(dim for dim in along if known.shape[dim] > 1)
    rest = [dim for dim in range(known.dim()) if dim not in own]
    columns = known.permute(*own, *rest).reshape(prod(known.shape[dim] for dim in own), -1)
    _, inverse = torch.unique(columns, dim=0, return_inverse=True)
    sizes = [known.shape[dim] if dim in own else 1 for dim in range(known.dim())]
    labels: Tensor = inverse.reshape(sizes)
    return labels


def ranks_of(ids: Tensor, along: set[int]) -> Tensor:
    """How often the coordinate at each position came before along the summed dimensions, one
    after the other; the most, if features vary along other dimensions, too.
    """
    small = narrowed(ids, varying(ids))
    rest = [dim for dim in range(ids.dim()) if dim not in along]
    rows = small.permute(*rest, *sorted(along)).reshape(prod(small.shape[d] for d in rest), -1)
    ranks = np.zeros(rows.shape, np.int64)
    for row, found in zip(rows.numpy(), ranks, strict=True):
        order = np.argsort(row, kind="stable")
        starts = np.r_[0, np.flatnonzero(np.diff(row[order])) + 1]
        lengths = np.diff(np.r_[starts, len(row)])
        found[order] = np.arange(len(row)) - np.repeat(starts, lengths)
        found[row == NEUTRAL] = 0
    most = torch.from_numpy(ranks.max(0))
    return most.reshape([n if dim in along else 1 for dim, n in enumerate(small.shape)])


def mixes_copies(ids: Tensor, dim: int) -> bool:
    """Whether a coordinate is several times beside another one along a dimension."""
    along = varying(ids)
    if dim not in along:
        return False
    small = narrowed(ids, along).movedim(dim, -1)
    rows = small.reshape(-1, small.shape[-1]).sort(dim=1).values
    twice = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] != NEUTRAL) & (rows[:, 1:] != ROOT)
    several = (rows != rows[:, :1]).any(1)
    return bool((twice.any(1) & several).any())
