"""The order in which an epoch meets its examples: in steps, cut into passes, and shared by processes.

A step is taken on ``accumulate * batch_size`` examples, the last of an epoch on those that are left. It is met in
passes of ``batch_size`` examples, and of every pass each process takes its share. The mean gradient of the step is

    sum over passes and processes of  (own examples / examples of the step) * gradient of the mean over own examples

so that neither a smaller last pass nor uneven shares change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler


@dataclass(frozen=True)
class Share:
    """What one process has of one pass.

    Args:
        examples: examples of this process that count; 0 where it has none and stands in with one of another.
        weight: factor of the mean loss over these examples; over processes the gradients are averaged.
        of: examples of the whole step, of all its passes and processes.
        first: the step begins with this pass.
        last: the step ends with this pass.
    """

    examples: int
    weight: float
    of: int
    first: bool
    last: bool


class Batches(Sampler[list[int]]):
    """Row numbers of one pass after the other, for a ``DataLoader`` that indexes whole batches.

    An epoch draws its order when it begins. Whoever puts the generator back to where it was then, and sets
    ``skip``, meets the rest of that epoch and leaves the generator as the whole epoch would have left it. The
    examples of a step do not depend on the number of processes, only who meets them does.

    Args:
        size: number of examples N.
        batch_size: examples per pass, over all processes; the last pass may be smaller.
        order: draws a new order for every epoch; ``None`` keeps the order of the rows.
        accumulate: passes per step.
        rank: number of this process, from 0.
        world: number of processes.

    Attributes:
        skip: steps at the start of an epoch that are passed over.

    Example:
        >>> batches = Batches(5, 2, accumulate=2)
        >>> list(batches), batches.steps
        ([[0, 1], [2, 3], [4]], 2)
        >>> batches.skip = 1
        >>> list(batches)
        [[4]]
        >>> [share.weight for share in batches.shares()]
        [1.0]
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        order: torch.Generator | None = None,
        *,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.size, self.batch_size, self.order, self.accumulate = size, batch_size, order, accumulate
        self.rank, self.world = rank, world
        self.skip = 0

    def __len__(self) -> int:
        """Count the passes of a whole epoch."""
        return math.ceil(self.size / self.batch_size)

    @property
    def steps(self) -> int:
        """Count the steps of a whole epoch."""
        return -(-len(self) // self.accumulate)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of this process, pass by pass, the first ``skip`` steps left out."""
        rows = range(self.size)
        sampler = SequentialSampler(rows) if self.order is None else RandomSampler(rows, generator=self.order)
        # To its end, also where nothing is yielded any more: the sampler draws once more after the last row.
        for number, batch in enumerate(BatchSampler(sampler, self.batch_size, drop_last=False)):
            if number >= self.skip * self.accumulate:
                # All processes run the same number of passes: one without examples runs another's, for nothing.
                yield batch[self.rank :: self.world] or batch[:1]

    def shares(self) -> Iterator[Share]:
        """Yield what this process has of the passes that :meth:`__iter__` yields."""
        step = self.batch_size * self.accumulate
        for number in range(self.skip * self.accumulate, len(self)):
            start = number * self.batch_size
            examples = len(range(start + self.rank, min(start + self.batch_size, self.size), self.world))
            of = min(step, self.size - start // step * step)
            ends = (number + 1) % self.accumulate == 0 or number + 1 == len(self)
            yield Share(examples, examples * self.world / of, of, number % self.accumulate == 0, ends)
