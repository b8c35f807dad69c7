"""The work on whole tensors: one masked reduction and one update, by groups of rows that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from training.optim.layout import Part


class Scratch:
    """Working memory shared by all tensors: at most 1/64 of the weights where tensors are large.

    Args:
        weights: number of weights of the optimizer.
    """

    def __init__(self, weights: int) -> None:
        self.weights = weights
        self.held: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def size(self, device: torch.device) -> int:
        """Numbers per group: few enough for the cache of a processor, more where kernel launches cost."""
        return max(1 << 14, min(self.weights // 64, (1 << 16) if device.type == "cpu" else (1 << 22)))

    def like(self, tensor: Tensor, which: int = 0) -> Tensor:
        """Memory of the shape and type of a tensor, contents unknown.

        Args:
            tensor: the shape wanted.
            which: different numbers never share memory.
        """
        size = self.size(tensor.device)
        if tensor.numel() > size:
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
    total: Tensor | None = None
    for w, g in groups(scratch.rows(part, weight.device), weight, grad):
        assert w is not None and g is not None
        product = torch.mul(w, g, out=scratch.like(w))
        some = product.sum(part.reduced) if part.reduced else product.clone()
        total = some if total is None else total.add_(some)
    assert total is not None
    return total.reshape(-1)


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
    for w, g, k, s, h in groups(scratch.rows(part, weight.device), weight, grad, keep, step, head):
        assert w is not None and g is not None
        if k is not None:
            w.mul_(k)
        if s is None and h is None:
            w.add_(g, alpha=-rate)
        elif s is None or h is None:
            factor = h if s is None else s
            assert factor is not None
            w.addcmul_(g, factor, value=-rate)
        else:
            w.addcmul_(torch.mul(g, s, out=scratch.like(w)), h, value=-rate)
