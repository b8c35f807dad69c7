"""Operations that split a tensor or join several: they are applied to the ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import Value, Weight, compress
from .movement import MOVED


def _cut_along(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    if len(parts) < 2 or any(
        part.shape != parts[0].shape or part.dim() != whole.dim() for part in parts
    ):
        return None
    return next(dim for dim, size in enumerate(whole.shape) if parts[0].shape[dim] != size)


def _pieces(*names: str) -> None:
    for name in names:

        @rule(f"aten.{name}", kind="split", **MOVED)
        def pieces(
            semantics: Semantics, x: Value, *args: Any, __name: str = name, **kwargs: Any
        ) -> tuple[Value, ...]:
            operation = getattr(torch.ops.aten, __name)
            if isinstance(x, Weight):
                count = len(operation(torch.empty(x.shape, device="meta"), *args, **kwargs))
                part = [lambda t, i=i: operation(t, *args, **kwargs)[i] for i in range(count)]
                return tuple(x.moved(function, semantics.offsets) for function in part)
            parts = tuple(operation(x, *args, **kwargs))
            dim = _cut_along(x, parts)
            if dim is not None:
                semantics.regrouped(x.unflatten(dim, (len(parts), -1)), [range(dim, dim + 2)])
            return parts


_pieces("split", "split_with_sizes", "chunk", "unbind", "tensor_split")


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate ids; other dimensions along which no part varies stay stride 0."""
    dim %= parts[0].dim()
    full = parts[0].shape
    small = list(parts)
    for d, size in enumerate(full):
        if d != dim and size > 1 and all(part.stride(d) == 0 for part in parts):
            small = [part.narrow(d, 0, 1) for part in small]
    joined = compress(torch.cat(small, dim))
    return joined.expand([joined.shape[d] if d == dim else size for d, size in enumerate(full)])


def _gathered(semantics: Semantics, values: Sequence[Value], dim: int) -> Value:
    """Concatenate: parameters give a parameter; parameters and activations give an activation."""
    if all(
        isinstance(value, Weight) and value.kept is None and not value.shift for value in values
    ):
        dense = [
            value.positions(semantics.offsets) for value in values if isinstance(value, Weight)
        ]
        return Weight(None, torch.cat(dense, dim))
    return _concatenated([semantics.activation(value) for value in values], dim)


state("aten.concat", "aten.concatenate", kind="concatenation", **MOVED)


@rule("aten.cat", kind="concatenation", **MOVED)
def cat(semantics: Semantics, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation along a dimension."""
    # torch ignores empty one-dimensional tensors in a concatenation
    kept = [t for t in tensors if tuple(t.shape) != (0,)] or list(tensors)
    return _gathered(semantics, kept, dim)


@rule("aten.stack", kind="concatenation", **MOVED)
def stack(semantics: Semantics, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Stacking along a new dimension."""
    rank = len(tensors[0].shape) + 1
    dim %= rank
    return _gathered(
        semantics, [semantics.moved(lambda t: t.unsqueeze(dim), value) for value in tensors], dim
    )
