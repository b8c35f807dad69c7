"""The computations on whole tensors, one after the other: a tensor needs no second factor of its
size, and what one needs is free again before the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tensors import PathTensor

HALF = (torch.float16, torch.bfloat16)
# where the factors of a tensor stand among those of all, and the shape in which they broadcast
Place = tuple[int, tuple[int, ...] | None] | None


class Factors:
    """Factors of all tensors by tail and by head, in the types of the tensors.

    Args:
        values: the factors, float64; those of all tensors follow each other.
        sizes: their numbers.
    """

    def __init__(self, values: Tensor, sizes: list[int]) -> None:
        self.values, self.sizes = values, sizes
        self._cast: dict[torch.dtype, tuple[Tensor, ...]] = {}

    def at(self, number: int, dtype: torch.dtype) -> Tensor:
        """The factors in one place, for tensors of a type."""
        if dtype not in self._cast:
            # (in half precision, factors would be rounded more than weights)
            kind = torch.promote_types(dtype, torch.float32)
            self._cast[dtype] = self.values.to(kind).split_with_sizes(self.sizes)
        return self._cast[dtype][number]

    def side(self, place: Place, dtype: torch.dtype) -> Tensor | None:
        """The factors of one tensor by tail or by head; ``None`` if all are 1."""
        if place is None:
            return None
        number, shape = place
        found = self.at(number, dtype)
        return found if shape is None else found.view(shape)

    def of(self, entry: PathTensor, dtype: torch.dtype) -> list[Tensor]:
        """The factors of one tensor other than 1, by tail and by head."""
        sides = (self.side(place, dtype) for place in (entry.tails, entry.heads))
        found = [side for side in sides if side is not None]
        # (one alone may be beyond the range of half precision)
        return [found[0] * found[1]] if len(found) == 2 and dtype in HALF else found


def divided(tensor: Tensor, factors: Sequence[Tensor], memory: Tensor | None) -> Tensor:
    """A tensor divided by its factors, in new memory, or in memory that is no longer used."""
    if not factors:
        return tensor.clone()
    for factor in factors:
        tensor = memory = torch.div(tensor, factor, out=memory)
    return tensor


def by_tail(entry: PathTensor, products: Tensor) -> Tensor:
    """Numbers of all edges, summed over those with the same tail, flat."""
    return (products.sum(entry.reduced) if entry.reduced else products).reshape(-1)


__all__ = ["HALF", "Factors", "by_tail", "divided"]
