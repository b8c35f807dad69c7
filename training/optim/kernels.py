"""The work on whole tensors: one masked reduction and one update, by groups of rows that stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.training.optim.layout import Part

Closure = Callable[[], Any]
Step = Callable[[Closure | None], Any]

# of so many tensors a compiler makes kernels for a processor in a minute
COMPILED = 16
# so many numbers, and what is computed from them, stay in the cache of a processor
CACHED = 1 << 17


def group_size(weights: int, device: torch.device) -> int:
    """Numbers per group: few enough for the cache of a processor, more where kernel launches cost.

    Args:
        weights: number of weights of all tensors; from two millions on, a group is at most 1/128 of them.
        device: where they are.
    """
    return max(1 << 14, min(weights // 128, CACHED if device.type == "cpu" else (1 << 22)))


def rows_of_group(part: Part, size: int) -> int:
    """Rows of a tensor per group of so many numbers (0: all at once)."""
    if not part.by_rows or part.view[0] * part.view[1] <= size:
        return 0
    return max(1, size // max(part.view[1], 1))


def worth_compiling(tensors: Sequence[Tensor], most: float = math.inf) -> bool:
    """Whether a step on these tensors is left to ``torch.compile``.

    On a processor a compiler makes a kernel for nearly every tensor, some seconds each: a ResNet-50 takes it many
    minutes. It does not work in groups of rows either, which costs more than it saves where tensors are large.

    Args:
        tensors: the weights.
        most: how many numbers they may have.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return True
    return len(tensors) <= COMPILED and sum(tensor.numel() for tensor in tensors) <= most


def taken(take: Step, closure: Closure | None, compiles: bool) -> Any:
    """Take a step, out of the compiler's sight unless it ``compiles``."""
    if compiles or not torch.compiler.is_compiling():
        return take(closure)
    return _uncompiled(take, closure)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(take: Step, closure: Closure | None) -> Any:
    return take(closure)


def groups(count: int, *tensors: Tensor | None) -> Iterator[list[Tensor | None]]:
    """Go through tensors by ``count`` rows (0: all); those with one row, and ``None``, come every time."""
    if count == 0:
        yield list(tensors)
        return
    total = max(t.shape[0] for t in tensors if t is not None)
    for start in range(0, total, count):
        yield [t if t is None or t.shape[0] == 1 else t[start : start + count] for t in tensors]


def leaving(part: Part, weight: Tensor, grad: Tensor, count: int) -> Tensor:
    """``w * g`` summed over all edges that share a tail, flat.

    Args:
        part: how the tensor is laid out.
        weight: the weights, in the part's view.
        grad: their gradient, in the part's view.
        count: rows per group (0: all at once).
    """
    return summed(part, weight * grad) if not count else part.gathered(by_column(weight, grad, count))


def by_column(first: Tensor, second: Tensor, count: int) -> Tensor:
    """Products of two matrices' entries, summed by column, ``count`` rows at a time.

    Example:
        >>> by_column(torch.ones(5, 2), torch.full((5, 2), 3.0), 2)
        tensor([15., 15.])
    """
    # groups of rows are added up element by element, in memory that stays in the cache, and then once by column
    (start, *firsts), (other, *seconds) = first.split(count), second.split(count)
    added: Tensor = start * other
    for a, b in zip(firsts, seconds, strict=True):
        added[: len(a)].addcmul_(a, b)
    return added.sum(0)


def summed(part: Part, product: Tensor) -> Tensor:
    """Numbers by edge, summed over all edges that share a tail, flat."""
    total = product.sum(part.reduced) if part.reduced else product
    return part.gathered(total) if total.dim() == 1 else total.reshape(-1)


def descend(
    weight: Tensor,
    grad: Tensor,
    keep: Tensor | None,
    step: Tensor | None,
    head: Tensor | None,
    rate: float,
    count: int,
) -> None:
    """``w <- w * keep - rate * g * step * head`` in place.

    Args:
        weight: the weights, in the part's view.
        grad: their gradient, in the part's view.
        keep: ``1 / R_tail``, broadcastable; ``None`` for 1.
        step: factor by tail (learning rates that are tensors included); ``None`` for 1.
        head: ``1 / s_head^2``, broadcastable; ``None`` for 1.
        rate: a learning rate that is a number.
        count: rows per group (0: all at once).
    """
    both = step is not None and head is not None
    # without working memory, larger groups are quicker
    count, work = (count, torch.empty_like(weight[:count])) if both and count else (4 * count, None)
    for w, g, k, s, h in groups(count, weight, grad, keep, step, head):
        assert w is not None and g is not None
        if k is not None:
            w.mul_(k)
        if s is not None and h is not None:
            w.addcmul_(torch.mul(g, s, out=None if work is None else work[: len(w)]), h, value=-rate)
        elif s is None and h is None:
            w.add_(g, alpha=-rate)
        else:
            factor = h if s is None else s
            assert factor is not None
            w.addcmul_(g, factor, value=-rate)
