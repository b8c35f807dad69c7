"""The values of an interpretation: activations as ids, and weights as views of parameters.

An *activation* is an ``int64`` tensor of the shape of the real tensor. Its entries are the ids of
the elements: ``ROOT`` for elements with a fixed scale, ``NEUTRAL`` for exact zeros (which have any
scale), positive or negative numbers otherwise. Dimensions in which the ids are constant have stride
0, so a batch of images needs no more memory than one vector. Tensors that depend only on constants
(masks, positions) also have their real value.

A *weight* is a view of parameters, stored as the positions of its scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ROOT = 0
NEUTRAL = 2**62


def shape_of(real: Tensor) -> tuple[int, ...]:
    """Sizes of a fake tensor; sizes that depend on data count as 1."""
    return tuple(size if isinstance(size, int) else _known_size(size) for size in real.shape)


def _known_size(size: object) -> int:
    node = getattr(size, "node", None)
    return int(node.hint) if node is not None and node.has_hint() else 1


@cache
def _one(value: int) -> Tensor:
    return torch.tensor(value)


def constant(shape: Sequence[int], value: int = ROOT) -> Tensor:
    """A stride-0 activation with one value everywhere, which nothing may write into."""
    return _one(value).expand(tuple(shape))


def constants_like(shown: Any, value: int = ROOT) -> Any:
    """Activations with one value in place of tensors, in nested results."""
    return pytree.tree_map_only(Tensor, lambda each: constant(shape_of(each), value), shown)


def has_zeros(ids: Tensor) -> bool:
    """Whether some elements are exact zeros, whose id is the largest."""
    return bool(ids.numel()) and int(distinct(ids).numpy().max()) == NEUTRAL


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    """The common shape; torch's own function takes ten times as long."""
    first = shapes[0]
    if isinstance(first, torch.Size) and all(shape == first for shape in shapes):
        return first
    rank = max(map(len, shapes))
    found = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                if found[dim] not in (1, size):
                    raise ValueError(
                        f"shapes {', '.join(map(str, map(tuple, shapes)))} cannot be broadcast"
                        " together"
                    )
                found[dim] = size
    return torch.Size(found)


def distinct(ids: Tensor) -> Tensor:
    """The tensor with size 1 along its stride-0 dimensions."""
    strides = ids.stride()
    if 0 not in strides:
        return ids
    sizes = [
        1 if stride == 0 and size > 1 else size
        for size, stride in zip(ids.shape, strides, strict=True)
    ]
    return ids.as_strided(sizes, strides)


def distinct_together(*ids: Tensor) -> list[Tensor]:
    """Tensors broadcast to one shape, with size 1 along dimensions in which none of them varies."""
    shape = broadcast_shape(*(entry.shape for entry in ids))
    wide = [entry.expand(shape) for entry in ids]
    for dim, strides in enumerate(zip(*(entry.stride() for entry in wide), strict=True)):
        if shape[dim] > 1 and not any(strides):
            wide = [entry.narrow(dim, 0, 1) for entry in wide]
    return wide


def compress(ids: Tensor) -> Tensor:
    """Give stride 0 to every dimension along which a tensor is constant."""
    shape = ids.shape
    if ids.numel() == 0 or ids.is_meta:
        return ids
    ids = distinct(ids)
    for dim in range(ids.dim()):
        if ids.shape[dim] > 1:
            head = ids.narrow(dim, 0, 1)
            # compare the second slice first, which is cheap and mostly enough
            if torch.equal(ids.narrow(dim, 1, 1), head) and bool((ids == head).all()):
                ids = head
    return ids.expand(shape)


def move(function: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Apply a movement operation to ids, with stride-0 dimensions restored if it copies."""
    moved = function(ids)
    if moved.numel() > 1 and moved.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
        moved = compress(moved)
    return moved


def along(function: Callable[..., Tensor], dims: Iterable[int], *ids: Tensor) -> Tensor:
    """An operation on tensors of one shape but for ``dims``, along which alone it mixes elements;
    on one of each repeated element.
    """
    shape = ids[0].shape
    others = set(range(len(shape))) - {dim % len(shape) for dim in dims if shape}
    small = list(ids)
    for dim in others:
        if shape[dim] > 1 and all(each.stride(dim) == 0 for each in ids):
            small = [each.narrow(dim, 0, 1) for each in small]
    result = compress(function(*small))
    return result.expand([shape[dim] if dim in others else n for dim, n in enumerate(result.shape)])


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """The finest split of two shapes of as many elements into corresponding runs."""
    found, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        start, a, b = (i, j), 1, 1
        if i < len(old):
            a, i = old[i], i + 1
        if j < len(new):
            b, j = new[j], j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        found.append((range(start[0], i), range(start[1], j)))
    return found


def reshaped(ids: Tensor, shape: Sequence[int]) -> Tensor:
    """``ids.reshape(shape)`` in which runs of stride-0 dimensions become stride-0 dimensions again.

    Example:
        >>> import torch
        >>> ids = torch.arange(6).reshape(1, 2, 3, 1).expand(64, 2, 3, 100)
        >>> reshaped(ids.transpose(1, 2), (8, 8, 6, 100)).stride()
        (0, 0, 1, 0)
    """
    if ids.shape == tuple(shape):
        # (a new object: attributes of the old one are not those of the result)
        return ids.view(tuple(shape))
    if ids.numel() == 0:
        return ids.reshape(shape)
    small, target = ids, list(shape)
    for old, new in reshape_groups(ids.shape, shape):
        if all(ids.shape[dim] == 1 or ids.stride(dim) == 0 for dim in old):
            for dim in old:
                small = small.narrow(dim, 0, 1)
            for dim in new:
                target[dim] = 1
    moved = small.reshape(target)
    if moved.untyped_storage().data_ptr() != small.untyped_storage().data_ptr():
        moved = compress(moved)
    return moved.expand(shape)


def value_of(value: object) -> Tensor | None:
    """The real value of an activation that depends only on constants, if it is stored."""
    return getattr(value, "known", None)


def with_value(real: Tensor) -> Tensor:
    """The activation of a known constant; zeros and infinities have any scale."""
    if real.layout != torch.strided or real.is_quantized:
        return constant(real.shape)
    real = real.detach().cpu()
    # (torch tests no 8-bit float for infinity)
    small = distinct(real.float() if real.dtype.is_floating_point and real.itemsize == 1 else real)
    free = (small == 0) | torch.isinf(small)
    ids = constant(real.shape)
    if real.dtype != torch.bool and bool(free.any()):
        ids = compress(torch.where(free, NEUTRAL, ROOT)).expand(real.shape)
    ids.known = real  # type: ignore[attr-defined]
    return ids


def unknown(value: Tensor) -> Tensor:
    """An activation without its known value."""
    return value if value_of(value) is None else value.expand(value.shape)


@dataclass(frozen=True)
class Weight:
    """A view of one parameter, or a dense tensor of the positions of scalars
    from several parameters.

    Attributes:
        name: the parameter, if ``index`` is a strided view of it.
        index: a *meta* tensor with the sizes, strides and offset of the view of the contiguous
            parameter ``name``; or, if ``name`` is ``None``, an ``int64`` tensor of positions in the
            numbering of all scalars.
        moves: the movements that give the view of the parameter.
        kept: mask of the scalars that a constant mask does not set to 0, in the shape of the view.
        shift: a constant added to every scalar: the factor is ``w + shift``.
    """

    name: str | None
    index: Tensor
    moves: tuple[Callable[[Tensor], Tensor], ...] = ()
    kept: Tensor | None = None
    shift: float = 0.0

    @property
    def shape(self) -> torch.Size:
        """Shape of the view."""
        return self.index.shape

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Weight:
        """The whole parameter."""
        return cls(name, torch.empty(tuple(shape), device="meta", dtype=torch.int8))

    def positions(self, offsets: dict[str, int]) -> Tensor:
        """Positions of all scalars in the numbering that starts at ``offsets[name]``."""
        if self.name is None:
            return self.index
        extent = 1 + self.index.storage_offset()
        extent += sum(
            (size - 1) * stride
            for size, stride in zip(self.shape, self.index.stride(), strict=True)
            if size
        )
        flat = torch.arange(int(max(extent, 1))) + offsets[self.name]
        return flat.as_strided(self.shape, self.index.stride(), self.index.storage_offset())

    def of_table(self, table: Tensor) -> Tensor:
        """The same view of a tensor in the layout of the parameter (for views of one parameter)."""
        for function in self.moves:
            table = move(function, table)
        return table

    def masked(self, kept: Tensor) -> Weight:
        """The weight times a constant mask."""
        kept = kept if self.kept is None else kept & self.kept
        return replace(self, kept=kept)

    def unmasked(self) -> Weight:
        """The weight without its mask."""
        return replace(self, kept=None)

    def moved(self, function: Callable[[Tensor], Tensor], offsets: dict[str, int]) -> Weight:
        """The weight after a movement: a view, or dense positions if it copies."""
        kept = None if self.kept is None else function(self.kept.expand(self.shape))
        if self.name is not None:
            moved = function(self.index)
            if moved.untyped_storage()._cdata == self.index.untyped_storage()._cdata:
                return Weight(self.name, moved, (*self.moves, function), kept, self.shift)
        return Weight(None, function(self.positions(offsets)), (), kept, self.shift)


Value = Tensor | Weight


def flat_values(tree: Any) -> list[Value]:
    """All activations and weights in nested arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Value)]
