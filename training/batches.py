"""The order in which an epoch meets its examples, cut into batches; it can be entered in the middle."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler


class Batches(Sampler[list[int]]):
    """Row numbers of one batch after the other, for a ``DataLoader`` that indexes whole batches.

    An epoch draws its order when it begins. Whoever puts the generator back to where it was then, and sets
    ``skip``, meets the rest of that epoch and leaves the generator as the whole epoch would have left it.

    Args:
        size: number of examples N.
        batch_size: examples per batch; the last batch may be smaller.
        order: draws a new order for every epoch; ``None`` keeps the order of the rows.

    Attributes:
        skip: batches at the start of an epoch that are passed over.

    Example:
        >>> batches = Batches(5, 2)
        >>> list(batches)
        [[0, 1], [2, 3], [4]]
        >>> batches.skip = 2
        >>> list(batches), len(batches)
        ([[4]], 3)
    """

    def __init__(self, size: int, batch_size: int, order: torch.Generator | None = None) -> None:
        self.size, self.batch_size, self.order = size, batch_size, order
        self.skip = 0

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch, the first ``skip`` left out."""
        rows = range(self.size)
        sampler = SequentialSampler(rows) if self.order is None else RandomSampler(rows, generator=self.order)
        # To its end, also where nothing is yielded any more: the sampler draws once more after the last row.
        for number, batch in enumerate(BatchSampler(sampler, self.batch_size, drop_last=False)):
            if number >= self.skip:
                yield batch
