"""The channels of running means and variances, which are rescaled together with the
activations that they describe.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .relations import Relations
from .values import NEUTRAL

SHARED = "norms with different eps divide by one running variance"
READ = "running statistics are read by something else than their normalisation"


class RunningStatistics:
    """Running means and variances by name, with the ids of their channels.

    Args:
        equations: where channels of one statistic are unified.
    """

    def __init__(self, equations: Relations) -> None:
        self._equations = equations
        # statistic -> (its power of the channels' scales, ids of the channels);
        # pairs of mean and variance
        self._channels: dict[str, tuple[int, Tensor]] = {}
        self._pairs: dict[tuple[str, str], None] = {}
        # running variance -> the eps that is added to it, and whether a frozen
        # normalisation divides by their sum
        self._eps: dict[str, tuple[float, bool]] = {}
        self._read: set[str] = set()

    def add(
        self, mean: str, var: str, ids: Tensor, eps: float, frozen: bool
    ) -> Iterator[tuple[Tensor, str]]:
        """Record one use; the channels of a statistic are the same in all its uses.

        ``var + eps`` is rescaled, so normalisations with the same variance
        must have the same ``eps``.

        Args:
            mean: name of the running mean.
            var: name of the running variance.
            ids: of the channels.
            eps: added to the variance.
            frozen: the normalisation divides by the statistics.

        Yields:
            Ids that must be fixed before it goes on, and why.
        """
        self._pairs[mean, var] = None
        first, divides = self._eps.get(var, (eps, False))
        self._eps[var] = (eps if first == eps else 0.0), divides or frozen
        if first != eps and (divides or frozen):
            yield ids, SHARED
        for power, name in ((1, mean), (2, var)):
            before, known = self._channels.get(name, (power, ids))
            self._equations.unify(known, ids)
            # (a channel can be zero in one use, and not in another)
            self._channels[name] = before, torch.where(known == NEUTRAL, ids, known)
            if before != power:
                yield from self.read(name)
            elif name in self._read:
                yield ids, READ

    def read(self, buffer: str) -> Iterator[tuple[Tensor, str]]:
        """Record that a buffer is used as data; if it is a statistic, now or
        later, its channels are fixed.

        Yields:
            Ids that must be fixed, and why.
        """
        if buffer in self._channels and buffer not in self._read:
            yield self._channels[buffer][1], READ
        self._read.add(buffer)

    def entries(self) -> list[tuple[str | None, str | None, Tensor, float]]:
        """Running mean, running variance, ids of their channels, and eps; every statistic once."""
        left, found = set(self._channels), []
        for pair in self._pairs:
            mean, var = (name if name in left else None for name in pair)
            left -= set(pair)
            if mean or var:
                found.append((mean, var, self._channels[pair[0]][1], self._eps[pair[1]][0]))
        return found
