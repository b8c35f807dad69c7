"""The order of the examples in an epoch: in steps, divided into passes, and shared by processes.

A step uses ``accumulate * batch_size`` examples, the last of an epoch the remaining ones. It is
divided into passes of ``batch_size`` examples, and each process has a share of every pass. The
mean gradient of the step is

    sum over passes and processes of  (own examples / examples of the step) * gradient of
    the mean over own examples

so neither a smaller last pass nor unequal shares change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler


@dataclass(frozen=True)
class Share:
    """The share of one process in one pass.

    Args:
        examples: number of its examples that count; 0 if it has none and runs an
            example of another process.
        weight: factor of the mean loss over these examples; the gradients are
            averaged over processes.
        of: number of examples of the whole step, in all its passes and processes.
        first: whether the step begins with this pass.
        last: whether the step ends with this pass.
    """

    examples: int
    weight: float
    of: int
    first: bool
    last: bool


class Batches(Sampler[list[int]]):
    """Row numbers of each pass, for a ``DataLoader`` that indexes whole batches.

    An epoch draws its order at its start. To resume inside an epoch, restore the
    generator's state at that start and set ``skip``: the rest of the epoch follows, and the
    final state of the generator is that of the whole epoch. The examples of a step do not
    depend on the number of processes.

    Args:
        size: number of examples N.
        batch_size: examples per pass, over all processes; the last pass may be smaller.
        order: generator of a new order for every epoch; ``None`` keeps the order of the rows.
        accumulate: passes per step.
        rank: number of this process, from 0.
        world: number of processes.

    Attributes:
        skip: number of steps to leave out at the start of an epoch.

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
        self.size, self.batch_size, self.order, self.accumulate = (
            size,
            batch_size,
            order,
            accumulate,
        )
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
        sampler = (
            SequentialSampler(rows)
            if self.order is None
            else RandomSampler(rows, generator=self.order)
        )
        # (to the end, because the sampler draws once more after the last row)
        for number, batch in enumerate(BatchSampler(sampler, self.batch_size, drop_last=False)):
            if number >= self.skip * self.accumulate:
                # all processes run the same number of passes: one without examples runs an
                # example that does not count
                yield batch[self.rank :: self.world] or batch[:1]

    def shares(self) -> Iterator[Share]:
        """Yield the shares of this process in the passes of :meth:`__iter__`."""
        step = self.batch_size * self.accumulate
        for number in range(self.skip * self.accumulate, len(self)):
            start = number * self.batch_size
            examples = len(
                range(start + self.rank, min(start + self.batch_size, self.size), self.world)
            )
            of = min(step, self.size - start // step * step)
            ends = (number + 1) % self.accumulate == 0 or number + 1 == len(self)
            yield Share(
                examples, examples * self.world / of, of, number % self.accumulate == 0, ends
            )
