"""What an interpretation keeps besides equations: ids that are powers of others, uses of weights,
and what flows into what, in order of execution, so that one pass backwards finds what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from .values import NEUTRAL, ROOT, Weight, distinct, has_zeros

Memory = tuple[int, tuple[tuple[int, int, int], ...]]


def memory(ids: Tensor) -> Memory:
    """A key for the ids of a tensor and their order, without expanded dimensions."""
    steps = zip(range(-ids.dim(), 0), ids.shape, ids.stride(), strict=True)
    return ids.data_ptr(), tuple(
        (dim, size, stride) for dim, size, stride in steps if size > 1 and stride
    )


def expanded_ids(ids: Tensor, shape: Sequence[int]) -> Tensor:
    """Ids expanded to a shape, without leading dimensions that it lacks."""
    ids = distinct(ids)
    while ids.dim() > len(shape):
        ids = ids.select(0, 0)
    return ids.expand(tuple(shape))


def distinct_columns(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct columns of ids without exact zeros, and the number of each column (or the count)."""
    kept = (columns != NEUTRAL).all(0).nonzero().reshape(-1)
    some = columns[:, kept]
    # sums modulo ``2^64`` are mostly different for different columns
    factors = torch.from_numpy(np.random.default_rng(0).integers(2**62, size=(len(some), 1)) | 1)
    sums = (some * factors).sum(0).numpy()
    _, first, number = np.unique(sums, return_index=True, return_inverse=True)
    if not torch.equal(some[:, first][:, number], some):
        _, first, number = np.unique(some.numpy(), axis=1, return_index=True, return_inverse=True)
    order = np.argsort(first)
    which = torch.full((columns.shape[1],), len(first))
    which[kept] = torch.from_numpy(np.argsort(order)[number])
    return some[:, first[order]], which


class Powers:
    """Tensors of ids with the ids of which they are a power, and the exponent."""

    def __init__(self) -> None:
        # (the tensors are kept, so that their memory is not given to others)
        self._known: dict[Memory, tuple[Tensor, Tensor, Fraction]] = {}

    def _of(self, ids: Tensor) -> tuple[Tensor, Fraction]:
        _, base, exponent = self._known.get(memory(ids), (ids, ids, Fraction(1)))
        return base, exponent

    def base(self, ids: Tensor) -> Tensor:
        """The ids of which these are a power, which can be themselves."""
        return self._of(ids)[0]

    def whole(self, ids: Tensor) -> tuple[Tensor, int] | None:
        """The base and the exponent of ids that are a whole power of others."""
        base, exponent = self._of(ids)
        if exponent.denominator > 1 or exponent == 1:
            return None
        return expanded_ids(base, ids.shape), exponent.numerator

    def note(self, made: Tensor, base: Tensor, exponent: Fraction) -> None:
        """Store that ids are a power of others."""
        if made.numel():
            first, own = self._of(base)
            self._known[memory(made)] = made, expanded_ids(first, made.shape), own * exponent

    def common(
        self, exponents: Sequence[Fraction], ids: Sequence[Tensor]
    ) -> tuple[Tensor, Fraction] | None:
        """The base and total exponent of a product of powers of the same ids, or ``None``."""
        known = [self._of(entry) for entry in ids]
        bases = [
            expanded_ids(base, entry.shape) for (base, _), entry in zip(known, ids, strict=True)
        ]
        if len({memory(base) for base in bases}) > 1 or not bases[0].numel() or has_zeros(bases[0]):
            return None
        return bases[0], sum(
            (power * own for power, (_, own) in zip(exponents, known, strict=True)), Fraction(0)
        )


@dataclass(frozen=True)
class Use:
    """One use of a weight; ids broadcast to the shape of the view."""

    weight: Weight
    tail: Tensor
    head: Tensor


class Flows:
    """A log of uses of weights, of ids that flow into others, or reach a fixed scale."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        # the number of a use, ids that reach a fixed scale, or ids that flow into others
        self._events: list[int | Tensor | tuple[Tensor, Tensor]] = []

    def use(self, use: Use) -> None:
        """Record a use of a weight: its tail flows into its head."""
        self._events.append(len(self.uses))
        self.uses.append(use)

    def into(self, source: Tensor, target: Tensor) -> None:
        """Record that ids flow into others of as many dimensions, elementwise."""
        if source.dim() != target.dim():
            raise ValueError(f"flow from {source.dim()} into {target.dim()} dimensions")
        self._events.append((source, target))

    def end(self, ids: Tensor) -> None:
        """Record that ids reach a fixed scale or a normalisation."""
        self._events.append(ids)

    def alive(self, size: int) -> list[Tensor]:
        """For every use, a mask of the heads that reach a fixed scale or a normalisation."""
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
    """Mark ids that flow into marked ids; the marks of ``target``."""
    marked = np.asarray(reached[np.where(target == NEUTRAL, zeros, np.abs(target))])
    lost = tuple(
        dim for dim, size in enumerate(marked.shape) if size > 1 and source.shape[dim] == 1
    )
    hit = marked.any(axis=lost, keepdims=True) if lost else marked
    met = source if hit.all() else source[np.broadcast_to(hit, source.shape)]
    reached[np.where(met == NEUTRAL, zeros, np.abs(met))] = True
    reached[-1] = False
    return marked
