"""The computations on whole tensors: small ones together, large ones in groups of rows that fit
into the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tensors import Entered, PathTensor

# number of elements that, with intermediate results, fit into the cache of a CPU
CACHED = 1 << 17
# number of elements that are worth a kernel launch of their own on a GPU
LAUNCHED = 1 << 22


class Factors:
    """Factors of all tensors by tail and by head, in the types of the tensors.

    Args:
        values: the factors, float64; those of all tensors follow each other.
        sizes: their numbers.
    """

    def __init__(self, values: Tensor, sizes: list[int]) -> None:
        self.values, self.sizes = values, sizes
        self._cast: dict[torch.dtype, tuple[Tensor, ...]] = {}

    def pieces(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The factors tensor by tensor, in a type."""
        if dtype not in self._cast:
            # (in half precision, factors would be rounded more than weights)
            kind = torch.promote_types(dtype, torch.float32)
            self._cast[dtype] = self.values.to(kind).split_with_sizes(self.sizes)
        return self._cast[dtype]

    def side(
        self, found: tuple[int, tuple[int, ...] | None] | None, dtype: torch.dtype
    ) -> Tensor | None:
        """The factors of one tensor by tail (one for all taps of a kernel) or by head."""
        if found is None:
            return None
        place, shape = found
        piece = self.pieces(dtype)[place]
        return piece if shape is None else piece.view(shape)

    def at_edges(self, entry: PathTensor, dtype: torch.dtype) -> Tensor:
        """The numbers of one tensor at its edges on the trees, where there is one for each."""
        return self.pieces(dtype)[entry.edges].to(dtype)

    def tail(self, entry: PathTensor, dtype: torch.dtype) -> Tensor | None:
        """The factors of one tensor by tail, which broadcast to it."""
        piece = self.side(entry.tails, dtype)
        return piece if piece is None or entry.taps == 1 else piece.repeat_interleave(entry.taps)

    def of(self, entry: PathTensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The factors of one tensor by tail and by head."""
        return self.tail(entry, dtype), self.side(entry.heads, dtype)


def large(tensor: Tensor) -> bool:
    """Whether a tensor exceeds a group of rows."""
    return tensor.dim() == 2 and tensor.numel() > group_size(tensor)


def in_groups(item: Entered) -> bool:
    """Whether a tensor is processed by groups of rows, which need one tail for each column."""
    return item.entry.by_column and large(item.weight)


def group_size(tensor: Tensor) -> int:
    """Number of elements of a group of rows."""
    return CACHED if tensor.device.type == "cpu" else LAUNCHED


class Part(NamedTuple):
    """Some rows of a tensor inside a step, or all of them.

    Attributes:
        item: the tensor.
        weight: its weights.
        gradient: the gradient.
        tail: factors by tail.
        head: factors by head.
    """

    item: Entered
    weight: Tensor
    gradient: Tensor | None
    tail: Tensor | None
    head: Tensor | None


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """What is processed together: groups of rows of one large tensor, and all small tensors."""
    small = []
    for part in parts:
        if not in_groups(part.item):
            small.append(part)
            continue
        total, columns = part.weight.shape
        count = max(1, group_size(part.weight) // max(columns, 1))
        for start in range(0, total, count):
            rows = [
                # (factors of one row are those of every row)
                t if t is None or t.dim() == 1 or t.shape[0] == 1 else t[start : start + count]
                for t in part[1:]
            ]
            yield [Part(part.item, *rows)]  # type: ignore[arg-type]
    if small:
        yield small


def together(
    function: Callable[[list[Any], list[Any]], Any], pairs: Iterable[tuple[Any, Any]]
) -> Any:
    """A function of torch's for many pairs of tensors, of those pairs that have both."""
    both = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    return function(*map(list, zip(*both, strict=True))) if both else ()


def enter_(
    items: Sequence[Entered], scale: Factors, alive: Tensor | None, *, straight: bool = False
) -> None:
    """Multiply weights by their factors, in place, and divide gradients by them.

    Large gradients are divided in place, others are new.

    Args:
        items: the tensors; their sums of ``w g`` by tail and gradients by path values are set.
        scale: their factors.
        alive: mask of the factors that no dead unit has; gradients of others become 0.
        straight: leave weights as they are.
    """
    parts = []
    for item in items:
        entry, weight = item.entry, item.weight
        item.tail, item.head = scale.of(entry, weight.dtype)
        if item.gradient is not None and in_groups(item):
            # (what is 0 at dead units does not come back)
            item.lent = not entry.lost
            item.written = item.gradient if item.lent else item.gradient.clone()
        parts.append(Part(item, weight, item.written, item.tail, item.head))
    for batch in batches(parts):
        _add_products(batch)
        whole = _factors(batch)
        _divide(batch, whole)
        if not straight:
            pairs = [(part.weight, factor) for part, factor in zip(batch, whole, strict=True)]
            together(torch._foreach_mul_, pairs)
    mask = None if alive is None else Factors(alive.double(), scale.sizes)
    for item in items:
        if item.total is not None:
            item.total = by_tail(item.entry, item.total)
        if item.written is not None:
            if mask is not None and item.entry.lost:
                for factor in mask.of(item.entry, item.weight.dtype):
                    if factor is not None:
                        item.written.mul_(factor)
            item.written = item.written.to(item.weight.dtype)


def _add_products(batch: Sequence[Part]) -> None:
    """Add ``w g`` of some rows to those of the rows before them, in the memory of one group."""
    summed = [part for part in batch if part.item.entry.sums and part.gradient is not None]
    if (first := summed[0].item.total if summed else None) is not None:
        rows = first[: len(summed[0].weight)]
        rows.addcmul_(summed[0].weight, summed[0].gradient)  # type: ignore[arg-type]
        return
    products = together(torch._foreach_mul, [(part.weight, part.gradient) for part in summed])
    for part, product in zip(summed, products, strict=True):
        part.item.total = product


def _divide(batch: Sequence[Part], factors: Sequence[Tensor | None]) -> None:
    """Divide gradients, large ones in place."""
    pairs = [(part.gradient, factor) for part, factor in zip(batch, factors, strict=True)]
    if in_groups(batch[0].item):
        together(torch._foreach_div_, pairs)
        return
    quotients = iter(together(torch._foreach_div, pairs))
    for part, pair in zip(batch, pairs, strict=True):
        if pair[0] is not None and pair[1] is not None:
            part.item.written = next(quotients)


def _factors(batch: Sequence[Part]) -> list[Tensor | None]:
    """The product of the factors by tail and by head of each part."""
    made = iter(together(torch._foreach_mul, [(part.tail, part.head) for part in batch]))
    return [
        (part.tail if part.head is None else part.head)
        if part.tail is None or part.head is None
        else next(made)
        for part in batch
    ]


def by_tail(entry: PathTensor, products: Tensor) -> Tensor:
    """Numbers of all edges, summed over those with the same tail (all taps of a kernel), flat."""
    total = products.sum(entry.reduced) if entry.reduced else products
    total = total.reshape(-1)
    return total if entry.taps == 1 else total.view(-1, entry.taps).sum(1)


def leave_(items: Sequence[Entered], turn: Factors, *, straight: bool = False) -> None:
    """Divide weights by their factors again, and by ``R_tail``, in place.

    (A product with the reciprocal would let weights that rest drift, by rounding.)

    Args:
        items: the tensors.
        turn: the factors by tail, times ``R_tail``; of ``R_tail`` alone for straight steps.
        straight: as on the way in.
    """
    parts = []
    for item in items:
        turned = item.entry.sums or not straight
        tail = turn.tail(item.entry, item.weight.dtype) if turned else None
        parts.append(Part(item, item.weight, None, tail, None if straight else item.head))
    for batch in batches(parts):
        pairs = zip([part.weight for part in batch], _factors(batch), strict=True)
        together(torch._foreach_div_, pairs)


def put_right_(items: Sequence[Entered]) -> None:
    """Multiply gradients that were divided in place."""
    lent = [
        Part(item, item.gradient, None, item.tail, item.head)
        for item in items
        if item.lent and item.gradient is not None
    ]
    for batch in batches(lent):
        pairs = zip([part.weight for part in batch], _factors(batch), strict=True)
        together(torch._foreach_mul_, pairs)


def leave_exactly_(item: Entered, before: Tensor, turn: Factors) -> None:
    """Write ``(w + (v' - v) / scale) / R_tail``, which leaves a weight as it was where nothing
    moved.

    Args:
        item: the tensor, with its path values after the step; they are overwritten.
        before: its weights before the step.
        turn: ``R_tail`` by tail, 1 by head.
    """
    kind = torch.promote_types(item.weight.dtype, torch.float32)
    tail, head = item.tail, item.head
    factor = head if tail is None else tail if head is None else tail * head
    start = before if factor is None else (before * factor).to(before.dtype)
    change = item.weight.to(kind) - start.to(kind)
    if factor is not None:
        change /= factor
    after, turned = change.add_(before), turn.tail(item.entry, kind)
    item.weight.copy_(after if turned is None else after / turned)


def leave_relatively_(item: Entered, before: Tensor, turn: Factors) -> None:
    """Multiply the weights before the step by their relative change."""
    tail = turn.tail(item.entry, item.weight.dtype)
    item.weight.mul_(before if tail is None else before / tail)


__all__ = [
    "CACHED",
    "Factors",
    "by_tail",
    "enter_",
    "leave_",
    "leave_exactly_",
    "leave_relatively_",
    "put_right_",
]
