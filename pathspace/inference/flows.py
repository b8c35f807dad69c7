"""What flows into what, in order of execution, so that one pass backwards finds what is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .values import NEUTRAL, ROOT, Weight, distinct


@dataclass(frozen=True)
class Use:
    """One use of a weight, with ``tail`` and ``head`` ids that broadcast
    to the shape of the view.
    """

    weight: Weight
    tail: Tensor
    head: Tensor


class Flows:
    """A log of uses of weights, of ids that flow into others, and of ids that reach a fixed scale.

    Attributes:
        uses: the uses of weights, in order of execution.
    """

    def __init__(self) -> None:
        self.uses: list[Use] = []
        # the number of a use, ids that reach a fixed scale, or ids that flow into others
        self._events: list[int | Tensor | tuple[Tensor, Tensor]] = []

    def use(self, use: Use) -> None:
        """Record a use of a weight: its tail flows into its head."""
        self._events.append(len(self.uses))
        self.uses.append(use)

    def into(self, source: Tensor, target: Tensor) -> None:
        """Record that ids flow into others of as many dimensions, elementwise after broadcasting.

        Raises:
            ValueError: the numbers of dimensions differ.
        """
        if source.dim() != target.dim():
            raise ValueError(f"flow from {source.dim()} into {target.dim()} dimensions")
        self._events.append((source, target))

    def end(self, ids: Tensor) -> None:
        """Record that ids reach a fixed scale or a normalisation."""
        self._events.append(ids)

    def alive(self, size: int) -> list[Tensor]:
        """For every use, a mask of the heads that reach a fixed scale or a normalisation.

        Args:
            size: number of ids.

        Returns:
            One mask per use, with the shape of its head.
        """
        reached = np.zeros(size + 1, bool)
        result: list[Tensor] = [torch.zeros(0)] * len(self.uses)
        for event in reversed(self._events):
            if isinstance(event, int):
                use = self.uses[event]
                head = _reach(reached, use.tail.numpy(), use.head.numpy(), zeros=ROOT)
                result[event] = torch.from_numpy(head)
            elif isinstance(event, tuple):
                source, target = event
                _reach(reached, source.numpy(), target.numpy(), zeros=-1)
            else:
                reached[event.numpy()] = True
        return result


def use_of(weight: Weight, tail: Tensor, head: Tensor) -> Use:
    """A use with size 1 for expanded dimensions of the view, which hold one scalar."""
    view = distinct(weight.index)
    lead = tail.dim() - view.dim()
    view = (
        view.reshape((1,) * lead + tuple(view.shape))
        if weight.name is None
        else view[(None,) * lead]
    )

    def fit(ids: Tensor) -> Tensor:
        for dim, size in enumerate(view.shape):
            if size == 1 and ids.shape[dim] > 1:
                ids = ids.narrow(dim, 0, 1)
        return ids

    return Use(Weight(weight.name, view), fit(distinct(tail)), fit(distinct(head)))


def _reach(reached: np.ndarray, source: np.ndarray, target: np.ndarray, zeros: int) -> np.ndarray:
    """Mark ids that flow into marked ids, elementwise after broadcasting.

    Args:
        reached: marks by id; the last one is never set.
        source: ids.
        target: the ids that they flow into, with as many dimensions.
        zeros: the place in ``reached`` that stands for exact zeros.

    Returns:
        The marks of ``target``.
    """
    marked = np.asarray(reached[np.where(target == NEUTRAL, zeros, np.abs(target))])
    lost = tuple(
        dim for dim, size in enumerate(marked.shape) if size > 1 and source.shape[dim] == 1
    )
    hit = marked.any(axis=lost, keepdims=True) if lost else marked
    met = source if hit.all() else source[np.broadcast_to(hit, source.shape)]
    reached[np.where(met == NEUTRAL, zeros, np.abs(met))] = True
    reached[-1] = False
    return marked
