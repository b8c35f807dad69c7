"""The computations on whole tensors: small ones together, large ones in groups of rows that fit
into the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .tensors import PathTensor

# number of elements that, with intermediate results, fit into the cache of a CPU
CACHED = 1 << 17
# number of elements that are worth a kernel launch of their own on a GPU
LAUNCHED = 1 << 22
# an entry, its weights and its gradient, in the shape of a step
Item = tuple[PathTensor, Tensor, Tensor | None]


class Factors:
    """Factors of all tensors by tail and by head, in the types of the tensors.

    Args:
        values: the factors, float64; those of all tensors follow each other.
        sizes: their numbers.
    """

    def __init__(self, values: Tensor, sizes: list[int]) -> None:
        self.values, self.sizes = values, sizes
        self._cast: dict[torch.dtype, tuple[Tensor, ...]] = {}
        # the factors of small tensors, one for every edge where they need both sides
        self.by_edge: dict[int, Tensor] = {}

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

    def tail(self, entry: PathTensor, dtype: torch.dtype) -> Tensor | None:
        """The factors of one tensor by tail, which broadcast to it."""
        piece = self.side(entry.tails, dtype)
        return piece if piece is None or entry.taps == 1 else piece.repeat_interleave(entry.taps)

    def of(self, entry: PathTensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The factors of one tensor by tail and by head."""
        return self.tail(entry, dtype), self.side(entry.heads, dtype)


def large(tensor: Tensor) -> bool:
    """Whether a tensor is processed by groups of rows."""
    return tensor.dim() == 2 and tensor.numel() > group_size(tensor)


def group_size(tensor: Tensor) -> int:
    """Number of elements of a group of rows."""
    return CACHED if tensor.device.type == "cpu" else LAUNCHED


def by_rows(*tensors: Tensor | None) -> Iterator[list[Tensor | None]]:
    """Iterate over matrices in groups of rows; one-row tensors and ``None`` are in every group."""
    first = next(t for t in tensors if t is not None)
    total, columns = first.shape
    count = max(1, group_size(first) // max(columns, 1))
    for start in range(0, total, count):
        yield [
            t if t is None or t.dim() == 1 or t.shape[0] == 1 else t[start : start + count]
            for t in tensors
        ]


def edge_factor(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The product of the factors by tail and by head."""
    if one is None or other is None:
        return other if one is None else one
    return one * other


def together(pairs: Sequence[tuple[Tensor, Tensor]], divide: bool = False) -> list[Tensor]:
    """Products or quotients of many pairs of tensors."""
    if not pairs:
        return []
    ones, others = map(list, zip(*pairs, strict=True))
    return list(torch._foreach_div(ones, others) if divide else torch._foreach_mul(ones, others))


def multiply_together_(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Multiply many tensors in place."""
    if pairs:
        ones, others = map(list, zip(*pairs, strict=True))
        torch._foreach_mul_(ones, others)


def enter_(
    items: Sequence[Item], scale: Factors, alive: Tensor | None
) -> tuple[dict[int, Tensor], list[Tensor | None]]:
    """Multiply weights by their factors, in place, and divide gradients by them.

    Large gradients are divided in place, others are new.

    Args:
        items: the tensors.
        scale: their factors.
        alive: mask of the factors that no dead unit has; gradients of others become 0.

    Returns:
        Position of a tensor -> sums of ``w g`` by tail, flat; and the gradients by path values.
    """
    totals: dict[int, Tensor] = {}
    written = [gradient for _, _, gradient in items]
    factors = [scale.of(entry, weight.dtype) for entry, weight, _ in items]
    small = []
    for i, (entry, weight, gradient) in enumerate(items):
        if not large(weight):
            small.append(i)
            continue
        if gradient is not None and entry.lost:
            # (what is 0 does not come back)
            written[i] = gradient = gradient.clone()
        total = _enter_large(weight, gradient, *factors[i], entry.sums > 0)
        if total is not None:
            totals[i] = by_tap(entry, total)
    summed = [i for i in small if items[i][2] is not None and items[i][0].sums]
    products = together([(items[i][1], items[i][2]) for i in summed])  # type: ignore[misc]
    for i, product in zip(summed, products, strict=True):
        totals[i] = by_tail(items[i][0], product)
    whole = edge_factors({i: factors[i] for i in small})
    scale.by_edge = {id(items[i][0]): factor for i, factor in whole.items()}
    divided = [i for i in whole if items[i][2] is not None]
    quotients = together([(items[i][2], whole[i]) for i in divided], divide=True)  # type: ignore[misc]
    for i, quotient in zip(divided, quotients, strict=True):
        written[i] = quotient.to(items[i][1].dtype)
    multiply_together_([(items[i][1], factor) for i, factor in whole.items()])
    if alive is not None:
        mask = Factors(alive.double(), scale.sizes)
        for (entry, weight, _), gradient in zip(items, written, strict=True):
            for side in mask.of(entry, weight.dtype) if gradient is not None and entry.lost else ():
                if side is not None:
                    gradient.mul_(side)  # type: ignore[union-attr]
    return totals, written


def by_tail(entry: PathTensor, products: Tensor) -> Tensor:
    """Numbers of all edges, summed over those with the same tail, flat."""
    total = products.sum(entry.reduced) if entry.reduced else products
    return by_tap(entry, total.reshape(-1))


def by_tap(entry: PathTensor, columns: Tensor) -> Tensor:
    """Numbers by column, summed over the taps of a kernel."""
    return columns if entry.taps == 1 else columns.view(-1, entry.taps).sum(1)


def edge_factors(factors: Mapping[int, tuple[Tensor | None, Tensor | None]]) -> dict[int, Tensor]:
    """The products of factors by tail and by head, of those tensors that have one."""
    found = {}
    both = []
    for i, (tail, head) in factors.items():
        if tail is not None and head is not None:
            both.append(i)
        elif tail is not None or head is not None:
            found[i] = head if tail is None else tail
    made = together([factors[i] for i in both])  # type: ignore[misc]
    return {**found, **dict(zip(both, made, strict=True))}  # type: ignore[dict-item]


def _enter_large(
    weight: Tensor, gradient: Tensor | None, tail: Tensor | None, head: Tensor | None, summed: bool
) -> Tensor | None:
    """The same for one tensor, by groups of rows; returns its sums by column."""
    total: Tensor | None = None
    if tail is None and head is None and not summed:
        return total
    for w, g, h in by_rows(weight, gradient, head):
        factor = edge_factor(tail, h)
        if g is not None and summed:
            if total is None:
                total = w * g  # type: ignore[operator]
            else:
                total[: len(g)].addcmul_(w, g)  # type: ignore[arg-type]
        if factor is not None:
            if g is not None:
                g.div_(factor)
            w.mul_(factor)  # type: ignore[union-attr]
    return None if total is None else total.sum(0)


def leave_(
    moved: Sequence[tuple[PathTensor, Tensor, Tensor | None]], scale: Factors, turn: Factors
) -> None:
    """Divide weights by their factors again, and multiply large gradients by them.

    (A product with the reciprocal would let weights that rest drift, by rounding.)

    Args:
        moved: tensors, with the gradients that were divided in place.
        scale: the factors of the way in.
        turn: ``1 / R_tail`` by tail, 1 by head.
    """
    small, turned = [], []
    for entry, weight, gradient in moved:
        last = turn.tail(entry, weight.dtype) if entry.sums else None
        if not large(weight):
            if (factor := scale.by_edge.get(id(entry))) is not None:
                small.append((weight, factor))
            if last is not None:
                turned.append((weight, last))
            continue
        tail, head = scale.of(entry, weight.dtype)
        if tail is None and head is None:
            continue
        for w, g, h in by_rows(weight, gradient, head):
            factor = edge_factor(tail, h)
            w.div_(factor)  # type: ignore[union-attr, arg-type]
            if last is not None:
                w.mul_(last)  # type: ignore[union-attr]
            if g is not None:
                g.mul_(factor)  # type: ignore[arg-type]
    if small:
        torch._foreach_div_(*map(list, zip(*small, strict=True)))
    multiply_together_(turned)


def restore_(entry: PathTensor, gradient: Tensor, scale: Factors) -> None:
    """Multiply a gradient that was divided in place."""
    tail, head = scale.of(entry, gradient.dtype)
    for g, h in by_rows(gradient, head):
        g.mul_(edge_factor(tail, h))  # type: ignore[union-attr, arg-type]


def leave_exactly_(
    entry: PathTensor, weight: Tensor, before: Tensor, scale: Factors, turn: Factors
) -> None:
    """Write ``(w + (v' - v) / scale) turn``, which leaves a weight as it was where nothing moved.

    Args:
        entry: the tensor.
        weight: its path values after the step; they are overwritten.
        before: its weights before the step.
        scale: the factors of the way in.
        turn: ``1 / R_tail`` by tail, 1 by head.
    """
    kind = torch.promote_types(weight.dtype, torch.float32)
    factor = edge_factor(*scale.of(entry, kind))
    start = before if factor is None else (before * factor).to(weight.dtype)
    change = weight.to(kind) - start.to(kind)
    if factor is not None:
        change /= factor
    after = change.add_(before)
    tail = turn.tail(entry, kind)
    weight.copy_(after if tail is None else after * tail)


def leave_relatively_(entry: PathTensor, weight: Tensor, before: Tensor, turn: Factors) -> None:
    """Multiply the weights before the step by their relative change."""
    tail = turn.tail(entry, weight.dtype)
    weight.mul_(before if tail is None else before * tail)


__all__ = [
    "CACHED",
    "Factors",
    "Item",
    "by_tail",
    "enter_",
    "leave_",
    "leave_exactly_",
    "leave_relatively_",
    "restore_",
]
