"""Readings whose ids belong to positions along dimensions of tensors: channels, feature spaces."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from .semantics import Semantics
from .values import ROOT, Weight, compress

Side = tuple[str, int]


def varying(ids: Tensor) -> set[int]:
    """Dimensions along which ids may differ."""
    return {
        dim
        for dim, (size, stride) in enumerate(zip(ids.shape, ids.stride(), strict=True))
        if size > 1 and stride
    }


class Sided(Semantics):
    """An interpretation with one id for each position along a dimension of a tensor.

    Attributes:
        sizes: shapes of the tensors.
        sides: (tensor, dimension) -> ids of its positions.
    """

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(offsets, shapes)
        self.sizes = dict(shapes)
        self.sides: dict[Side, Tensor] = {}

    @abstractmethod
    def fresh(self, count: int) -> Tensor:
        """New ids, all different."""

    def side(self, name: str, dim: int) -> Tensor:
        """Ids of the positions along one dimension of a tensor."""
        if (name, dim) not in self.sides:
            self.sides[name, dim] = self.fresh(self.sizes[name][dim])
        return self.sides[name, dim]

    def long(self, name: str) -> list[int]:
        """Dimensions of a tensor that are longer than 1."""
        return [dim for dim, size in enumerate(self.sizes[name]) if size > 1]

    def laid(self, name: str, dim: int) -> Tensor:
        """Ids along one dimension, in the shape of the tensor."""
        shape = self.sizes[name]
        return (
            self.side(name, dim)
            .reshape([-1 if d == dim else 1 for d in range(len(shape))])
            .expand(shape)
        )

    def places(self, weight: Weight) -> list[tuple[list[Side], Tensor]]:
        """Sides and ids of the positions of a view, for every dimension of the parameters."""
        if weight.name is not None:
            own = weight.name
            return [([(own, d)], weight.of_table(self.laid(own, d))) for d in self.long(own)]
        found: dict[int, tuple[list[Side], Tensor]] = {}
        for name, inside, local in self.parts(weight):
            for dim in self.long(name):
                sides, ids = found.setdefault(dim, ([], torch.full(weight.index.shape, ROOT)))
                sides.append((name, dim))
                ids[inside] = self.laid(name, dim).reshape(-1)[local]
        return [(sides, compress(ids)) for sides, ids in found.values()]
