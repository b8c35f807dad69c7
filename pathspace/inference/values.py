"""What flows through the captured graph while it is interpreted.

An *activation* is an ``int64`` tensor of the shape of the real tensor. Its entries say which node of the analysis
each element belongs
to: ``ROOT`` for elements whose scale is fixed, ``NEUTRAL`` for exact zeros (they have any scale one likes), positive
    or negative numbers otherwise.
Dimensions along which nothing changes have stride 0, so a batch of images costs no more than one vector.

A *weight* is a view of parameters, carried as the positions of its scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROOT = 0
NEUTRAL = 2**62


def constant(shape: Sequence[int], value: int = ROOT) -> Tensor:
    """A stride-0 activation with one value everywhere."""
    return torch.tensor(value).expand(tuple(shape))


def distinct(ids: Tensor) -> Tensor:
    """The tensor without repetition along its stride-0 dimensions (each kept with size 1)."""
    for dim, (size, stride) in enumerate(zip(ids.shape, ids.stride(), strict=True)):
        if stride == 0 and size > 1:
            ids = ids.narrow(dim, 0, 1)
    return ids


def compress(ids: Tensor) -> Tensor:
    """Give stride 0 to every dimension along which a freshly written tensor is constant."""
    shape = ids.shape
    if ids.numel() == 0:
        return ids
    ids = distinct(ids)
    for dim in range(ids.dim()):
        if ids.shape[dim] > 1:
            head = ids.narrow(dim, 0, 1)
            # a cheap look at the second slice first: most dimensions that vary do so at once
            if torch.equal(ids.narrow(dim, 1, 1), head) and bool((ids == head).all()):
                ids = head
    return ids.expand(shape)


def move(function: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Apply a movement operation to the ids themselves, keeping stride-0 dimensions where it copies."""
    moved = function(ids)
    if moved.numel() > 1 and moved.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
        moved = compress(moved)
    return moved


@dataclass(frozen=True)
class Weight:
    """A view of one parameter, or a dense tensor of scalar positions drawn from several.

    Attributes:
        name: the parameter, when ``index`` is a strided view of it.
        index: a *meta* tensor whose sizes, strides and offset describe the view of the contiguous parameter ``name``;
            or, when ``name`` is ``None``, an ``int64`` tensor of positions in the numbering of all scalars.
    """

    name: str | None
    index: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the view."""
        return self.index.shape

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Weight:
        """The whole parameter."""
        return cls(name, torch.empty(tuple(shape), device="meta", dtype=torch.int8))

    def positions(self, offsets: dict[str, int]) -> Tensor:
        """Positions of all scalars of the view in the numbering where parameter ``n`` starts at ``offsets[n]``."""
        if self.name is None:
            return self.index
        extent = 1 + self.index.storage_offset()
        extent += sum((size - 1) * stride for size, stride in zip(self.shape, self.index.stride(), strict=True) if size)
        flat = torch.arange(int(max(extent, 1))) + offsets[self.name]
        return flat.as_strided(self.shape, self.index.stride(), self.index.storage_offset())

    def moved(self, function: Callable[[Tensor], Tensor], offsets: dict[str, int]) -> Weight:
        """The weight after a movement operation: still a view if the operation is one, dense positions otherwise."""
        if self.name is not None:
            moved = function(self.index)
            if moved.untyped_storage()._cdata == self.index.untyped_storage()._cdata:
                return Weight(self.name, moved)
        return Weight(None, function(self.positions(offsets)))


Value = Tensor | Weight


def numel(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)
