"""The computations on whole tensors: one masked reduction and one update, in groups of
rows that fit into the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import Part

Closure = Callable[[], Any]
Step = Callable[[Closure | None], Any]

# largest number of tensors for which kernels for a CPU are compiled within about a minute
COMPILED = 16
# number of elements that, with intermediate results, fit into the cache of a CPU
CACHED = 1 << 17
# number of elements that are worth a kernel launch of their own on a GPU
LAUNCHED = 1 << 22


def group_size(weights: int, device: torch.device) -> int:
    """Number of elements per group: small enough for the cache of a CPU, larger if
    kernel launches are expensive.

    Args:
        weights: number of weights of all tensors; from two million on, a group on a CPU
            is at most 1/128 of them.
        device: their device.
    """
    return max(1 << 14, min(weights // 128, CACHED)) if device.type == "cpu" else LAUNCHED


def rows_of_group(part: Part, size: int) -> int:
    """Number of rows per group of ``size`` elements (0: all rows)."""
    if not part.by_rows or part.view[0] * part.view[1] <= size:
        return 0
    return max(1, size // max(part.view[1], 1))


def worth_compiling(tensors: Sequence[Tensor], most: float = math.inf) -> bool:
    """Whether ``torch.compile`` should compile a step on these tensors.

    For a CPU it creates a kernel for nearly every tensor, in some seconds each: a ResNet-50 takes
    many minutes. It also does not use groups of rows, which makes steps on large tensors slower.

    Args:
        tensors: the weights.
        most: largest number of elements.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return True
    return len(tensors) <= COMPILED and sum(tensor.numel() for tensor in tensors) <= most


def taken(take: Step, closure: Closure | None, compiles: bool) -> Any:
    """Take a step, hidden from the compiler unless ``compiles`` is true."""
    if compiles or not torch.compiler.is_compiling():
        return take(closure)
    return _uncompiled(take, closure)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(take: Step, closure: Closure | None) -> Any:
    return take(closure)


def groups(count: int, *tensors: Tensor | None) -> Iterator[list[Tensor | None]]:
    """Iterate over tensors in groups of ``count`` rows (0: all); one-row tensors and
    ``None`` are in every group.
    """
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
    return (
        summed(part, weight * grad) if not count else part.gathered(by_column(weight, grad, count))
    )


def by_column(first: Tensor, second: Tensor, count: int) -> Tensor:
    """Sums over columns of the products of two matrices' entries, ``count`` rows at a time.

    Example:
        >>> by_column(torch.ones(5, 2), torch.full((5, 2), 3.0), 2)
        tensor([15., 15.])
    """
    # add groups of rows elementwise in memory that fits into the cache, then sum over columns once
    (start, *firsts), (other, *seconds) = first.split(count), second.split(count)
    added: Tensor = start * other
    for a, b in zip(firsts, seconds, strict=True):
        added[: len(a)].addcmul_(a, b)
    return added.sum(0)


def summed(part: Part, product: Tensor) -> Tensor:
    """Values by edge, summed over all edges with the same tail, flat."""
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
    # without working memory, larger groups are faster
    count, work = (count, torch.empty_like(weight[:count])) if both and count else (4 * count, None)
    for w, g, k, s, h in groups(count, weight, grad, keep, step, head):
        assert w is not None and g is not None
        if k is not None:
            w.mul_(k)
        if s is not None and h is not None:
            w.addcmul_(
                torch.mul(g, s, out=None if work is None else work[: len(w)]), h, value=-rate
            )
        elif s is None and h is None:
            w.add_(g, alpha=-rate)
        else:
            factor = h if s is None else s
            assert factor is not None
            w.addcmul_(g, factor, value=-rate)
