"""The work on whole tensors: one masked reduction and one update, by groups of rows that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from training.optim.layout import Part


class Scratch:
    """Working memory shared by all tensors: at most 1/128 of the weights where tensors are large.

    Args:
        sizes: number of weights of each tensor.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.weights, self.largest = sum(sizes), max(sizes, default=1)
        self.held: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}
        self.plans: dict[Part, tuple[int, Tensor | None]] = {}

    def size(self, device: torch.device) -> int:
        """Numbers per group: few enough for the cache of a processor, more where kernel launches cost."""
        wanted = max(1 << 14, min(self.weights // 128, (1 << 15) if device.type == "cpu" else (1 << 22)))
        return min(wanted, self.largest)

    def like(self, tensor: Tensor, which: int = 0) -> Tensor:
        """Memory of the shape and type of a tensor, contents unknown.

        Args:
            tensor: the shape wanted.
            which: different numbers never share memory.
        """
        size = self.size(tensor.device)
        if tensor.numel() > size or torch.compiler.is_compiling():
            return torch.empty_like(tensor)
        key = (tensor.device, tensor.dtype, which)
        if key not in self.held:
            self.held[key] = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
        return self.held[key][: tensor.numel()].view(tensor.shape)

    def rows(self, part: Part, device: torch.device) -> int:
        """Rows per group of a tensor (0: all at once)."""
        if not part.by_rows or part.view[0] * part.view[1] <= self.size(device):
            return 0
        return max(1, self.size(device) // max(part.view[1], 1))

    def plan(self, part: Part, tensor: Tensor) -> tuple[int, Tensor | None]:
        """Rows per group of a tensor, and memory of its shape where it is worked on at once; found once."""
        if torch.compiler.is_compiling():
            # a compiler finds its own groups and memory
            return 0, None
        if part not in self.plans:
            rows = self.rows(part, tensor.device)
            fits = not rows and tensor.numel() <= self.size(tensor.device)
            self.plans[part] = (rows, self.like(tensor) if fits else None)
        return self.plans[part]


def groups(count: int, *tensors: Tensor | None) -> Iterator[list[Tensor | None]]:
    """Go through tensors by ``count`` rows (0: all); those with one row, and ``None``, come every time."""
    if count == 0:
        yield list(tensors)
        return
    total = max(t.shape[0] for t in tensors if t is not None)
    for start in range(0, total, count):
        yield [t if t is None or t.shape[0] == 1 else t[start : start + count] for t in tensors]


def leaving(part: Part, weight: Tensor, grad: Tensor, scratch: Scratch) -> Tensor:
    """``w * g`` summed over all edges that share a tail, flat.

    Args:
        part: how the tensor is laid out.
        weight: the weights, in the part's view.
        grad: their gradient, in the part's view.
        scratch: working memory.
    """
    count, work = scratch.plan(part, weight)
    if not count:
        product = torch.mul(weight, grad, out=work)
        if part.reduced:
            total = product.sum(part.reduced)
            return part.gathered(total) if total.dim() == 1 else total.reshape(-1)
        return product.reshape(-1).clone() if work is not None else product.reshape(-1)
    # groups of rows are added up element by element, in memory that stays in the cache, and then once by column
    added: Tensor | None = None
    for w, g in groups(count, weight, grad):
        assert w is not None and g is not None
        if added is None:
            added = torch.mul(w, g, out=scratch.like(w))
        else:
            added[: len(w)].addcmul_(w, g)
    assert added is not None
    return part.gathered(added.sum(0))


def descend(
    part: Part,
    weight: Tensor,
    grad: Tensor,
    keep: Tensor | None,
    step: Tensor | None,
    head: Tensor | None,
    rate: float,
    scratch: Scratch,
) -> None:
    """``w <- w * keep - rate * g * step * head`` in place.

    Args:
        part: how the tensor is laid out.
        weight: the weights, in the part's view.
        grad: their gradient, in the part's view.
        keep: ``1 / R_tail``, broadcastable; ``None`` for 1.
        step: factor by tail (learning rates that are tensors included); ``None`` for 1.
        head: ``1 / s_head^2``, broadcastable; ``None`` for 1.
        rate: a learning rate that is a number.
        scratch: working memory.
    """
    count, work = scratch.plan(part, weight)
    if not count:
        _descend(weight, grad, keep, step, head, rate, work)
        return
    if step is None or head is None:
        # no working memory is needed: larger groups are quicker
        count *= 4
    for w, g, k, s, h in groups(count, weight, grad, keep, step, head):
        assert w is not None and g is not None
        _descend(w, g, k, s, h, rate, None if s is None or h is None else scratch.like(w))


def _descend(
    weight: Tensor,
    grad: Tensor,
    keep: Tensor | None,
    step: Tensor | None,
    head: Tensor | None,
    rate: float,
    work: Tensor | None,
) -> None:
    """The same for some rows."""
    if keep is not None:
        weight.mul_(keep)
    if step is None and head is None:
        weight.add_(grad, alpha=-rate)
    elif step is None or head is None:
        factor = head if step is None else step
        assert factor is not None
        weight.addcmul_(grad, factor, value=-rate)
    else:
        weight.addcmul_(torch.mul(grad, step, out=work), head, value=-rate)
