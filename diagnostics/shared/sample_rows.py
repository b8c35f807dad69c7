"""Where the samples of a batch are in an activation.

A model may merge the samples with windows or steps in one dimension, in any order: windows of each
sample, ``B * W``, or, with time first, the samples of each step, ``T * B``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.errors import InputTypeError, UnsupportedError

Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Samples:
    """The samples are in dimension ``dim``, which merges ``outer``, the samples, and ``inner``.

    Example:
        >>> time_first = Samples(dim=0, outer=2, inner=1)
        >>> time_first.rows(torch.tensor([1, 2, 3, 10, 20, 30]), 3).tolist()
        [[1, 10], [2, 20], [3, 30]]
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def split(self, shape: Sequence[int], samples: int) -> tuple[int, int, int]:
        """The sizes of the three parts of the dimension.

        Raises:
            UnsupportedError: the dimension is not made of so many samples.
        """
        size = shape[self.dim] if shape else 1
        others = size // max(samples, 1)
        if others == self.outer * self.inner:
            sizes = (self.outer, samples, self.inner)
        elif self.outer == 1:
            sizes = (1, samples, others)
        else:
            sizes = (others // self.inner, samples, self.inner)
        if sizes[0] * sizes[1] * sizes[2] != size:
            raise UnsupportedError(
                f"A node of shape {tuple(shape)} has {size} entries in dimension {self.dim}, which"
                f" are not those of {samples} samples; trace the chain with inputs of the same"
                " form, or pass another batch_dim."
            )
        return sizes

    def rows(self, value: Tensor, samples: int) -> Tensor:
        """The value of every sample, flattened, shape (samples, D)."""
        if not value.ndim:
            return value.reshape(1, 1)
        split: Tensor = value.unflatten(self.dim, self.split(value.shape, samples))
        return split.movedim(self.dim + 1, 0).reshape(samples, -1)

    def back(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """A value of a given shape from its :meth:`rows`."""
        split = self.split(shape, len(rows))
        moved = (*shape[: self.dim], split[0], split[2], *shape[self.dim + 1 :])
        return rows.reshape(len(rows), *moved).movedim(0, self.dim + 1).reshape(tuple(shape))


def grown_dim(one: Sequence[int], two: Sequence[int]) -> int | None:
    """The only dimension that is twice as large for a doubled batch.

    Example:
        >>> grown_dim((3, 4), (6, 4))
        0
    """
    pairs = zip(one, two, strict=False)
    grown = [dim for dim, (old, new) in enumerate(pairs) if new == 2 * old]
    return grown[0] if len(grown) == 1 else None


def in_order(dim: int, one: Tensor, two: Tensor, samples: int) -> Samples:
    """The order in which a dimension merges the samples and others.

    Args:
        dim: the dimension.
        one: the activation on the batch.
        two: on the batch followed by itself.
        samples: size of the batch.
    """
    others, rest = divmod(one.shape[dim], samples)
    if rest or one.shape[dim] * 2 != two.shape[dim]:
        return Samples(dim)
    orders = [Samples(dim, n, others // n) for n in range(1, others + 1) if others % n == 0]
    # (random operations, such as dropout, differ between both runs: no order fits exactly)
    found = min(orders, key=lambda order: _distance(order, one, two, samples))
    return found if found.outer > 1 else Samples(dim)


def _distance(order: Samples, one: Tensor, two: Tensor, samples: int) -> float:
    rows = order.rows(one.double(), samples)
    twice = order.rows(two.double(), 2 * samples)
    value = float((twice - torch.cat([rows, rows])).nan_to_num(0, 0, 0).square().sum())
    return value


def batch_size(example: Example, dim: int = 0) -> int:
    """The number of samples: the size of the first tensor in dimension ``dim``."""
    for value in (*example[0], *example[1].values()):
        if isinstance(value, Tensor) and value.ndim > dim:
            return int(value.shape[dim])
    raise InputTypeError(
        f"The model has no tensor with a dimension {dim} among its inputs, so it has no dimension"
        " of samples; pass such a tensor, or another batch_dim."
    )


def doubled(example: Example, dim: int) -> Example:
    """The batch followed by itself."""
    size = batch_size(example, dim)

    def twice(value: Any) -> Any:
        held = isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == size
        return torch.cat([value, value], dim) if held else value

    return tuple(map(twice, example[0])), {key: twice(value) for key, value in example[1].items()}


__all__ = ["Example", "Samples", "batch_size", "doubled", "grown_dim", "in_order"]
