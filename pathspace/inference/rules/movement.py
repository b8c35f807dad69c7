"""Operations that only move data, split a tensor or join several: they are applied to the ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..registry import rule, state
from ..semantics import Semantics
from ..values import (
    NEUTRAL,
    ROOT,
    Value,
    Weight,
    along,
    compress,
    reshape_groups,
    reshaped,
    shape_of,
)

aten = torch.ops.aten
# properties of every movement of data
MOVED: dict[str, Any] = {"degree": (1,), "linear": "jointly", "coefficients": "one"}


def _movement(kind: str, *names: str) -> None:
    for name in names:

        @rule(f"aten.{name}", f"aten.{name}_copy", kind=kind, **MOVED)
        def moved(
            semantics: Semantics, x: Value, *args: Any, __name: str = name, **kwargs: Any
        ) -> Value:
            operation = getattr(aten, __name)
            return semantics.moved(lambda ids: operation(ids, *args, **kwargs), x)


_movement("movement", "squeeze", "unsqueeze", "permute", "transpose", "t", "movedim", "swapaxes")
_movement("movement", "channel_shuffle")
state("aten.roll", "aten.numpy_T", "aten.mT", kind="movement", **MOVED)
_movement("part", "select", "slice", "narrow", "diagonal")
_movement("repetition", "unfold")
_movement("upsampling", "pixel_shuffle")
_movement("resampling", "pixel_unshuffle")


@rule("aten.as_strided", "aten.as_strided_copy", kind="part")
@rule("aten.as_strided_scatter", kind="write")
def as_strided(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Elements selected by their position in memory, for tensors that are contiguous in memory."""
    node = semantics.place.node
    real = None if node is None else node.all_input_nodes[0].meta.get("val")
    if not isinstance(real, Tensor) or not real.is_contiguous() or real.storage_offset():
        raise ValueError("memory with another layout")
    size, stride, *start = args[1:] if semantics.place.op.endswith("scatter") else args
    first = (start[0] if start else kwargs.get("storage_offset")) or 0
    if first + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= real.numel():
        raise UnsupportedError(
            f"as_strided at {semantics.place.source or 'an unknown line'} reads memory beyond its"
            " operand, which is a part of another tensor; call it on that tensor, or use slices."
        )
    if semantics.place.op == "aten.as_strided_scatter":
        return scatter_view(semantics, x, *args, **kwargs)
    if isinstance(x, Weight):
        return x.moved(lambda t: t.contiguous().as_strided(*args, **kwargs), semantics.offsets)
    return semantics.moved(lambda ids: ids.contiguous().as_strided(*args, **kwargs), x)


@rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten",
      "aten.view_as", "aten.reshape_as", "aten.ravel", "aten.view_copy", kind="movement",
      **MOVED)  # fmt: skip
def reshape(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Another shape for the same elements."""
    if any(isinstance(arg, torch.dtype) for arg in args):
        raise ValueError("bits read as another type")
    shape = shape_of(semantics.place.result)
    out = semantics.moved(lambda ids: reshaped(ids, shape), x)
    semantics.regrouped(out, [new for _, new in reshape_groups(x.shape, shape) if len(new) > 1])
    return out


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to", kind="repetition", **MOVED)
def expand(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """The same elements many times."""
    shape = shape_of(semantics.place.result)
    return semantics.moved(lambda ids: ids.expand(shape), x)


@rule("aten.repeat", kind="repetition", **MOVED)
def repeat(semantics: Semantics, x: Value, times: Sequence[int]) -> Value:
    """Repetition, as an expansion and a reshape."""
    shape = shape_of(semantics.place.result)
    rank = len(shape)

    def repeated(ids: Tensor) -> Tensor:
        ids = ids[(None,) * (rank - ids.dim())]
        old = [size for n in ids.shape for size in (1, n)]
        wide = [
            size
            for n, total in zip(ids.shape, shape, strict=True)
            for size in (total // max(n, 1), n)
        ]
        return reshaped(reshaped(ids, old).expand(wide), shape)

    return semantics.moved(repeated, x)


@rule("aten.flip", kind="movement", **MOVED)
def flip(semantics: Semantics, x: Value, dims: Sequence[int]) -> Value:
    """The elements in reverse order."""
    return semantics.moved(
        lambda ids: along(lambda t: t.flip(list(dims)), ids, dims) if ids.dim() else ids, x
    )


@rule("aten.repeat_interleave", kind="repetition", **MOVED)
def repeat_interleave(
    semantics: Semantics, x: Value, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Value:
    """Each element several times in a row."""
    if not isinstance(repeats, int):
        # (the graph does not know how often each is there)
        ids = semantics.reduce(x, range(len(x.shape)) if dim is None else [dim], keepdim=True)
        ids = ids.reshape(()) if dim is None else ids
        return ids.expand(shape_of(semantics.place.result))
    if dim is None:
        return semantics.moved(lambda ids: ids.reshape(-1).repeat_interleave(repeats), x)
    return semantics.moved(
        lambda ids: along(lambda t: t.repeat_interleave(repeats, dim), ids, [dim]), x
    )


def _widened(ids: Tensor, padding: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Give narrow margins of large images the scale of their interior."""
    rest, sizes = list(padding), list(ids.shape)
    for i in range(len(padding) // 2):
        dim, (before, after) = ids.dim() - 1 - i, padding[2 * i : 2 * i + 2]
        inside = min(before, after) >= 0 and ids.shape[dim] > 4 * (before + after) > 0
        if inside and ids.stride(dim) == 0:
            rest[2 * i : 2 * i + 2] = [0, 0]
            ids, sizes[dim] = ids.narrow(dim, 0, 1), ids.shape[dim] + before + after
    return ids.expand(sizes), rest


@rule("aten.pad", "aten.constant_pad_nd", kind="padding", **MOVED)
def pad(
    semantics: Semantics,
    x: Value,
    padding: Sequence[int],
    mode: Any = "constant",
    value: Any = None,
) -> Value:
    """Padding: zeros have any scale, other constants have a fixed one."""
    if not isinstance(mode, str):
        mode, value = "constant", mode
    if mode != "constant":
        raise ValueError("padding by elements")
    ids = semantics.activation(x)
    touched = [ids.dim() - 1 - i for i in range(len(padding) // 2)]
    fill = NEUTRAL if value in (None, 0, 0.0, float("inf"), float("-inf")) else ROOT
    if fill == NEUTRAL and semantics.uniform:
        ids, padding = _widened(ids, padding)
    return along(lambda t: torch.nn.functional.pad(t, list(padding), value=fill), ids, touched)


@rule("aten.slice_scatter", "aten.select_scatter", "aten.diagonal_scatter", kind="write", **MOVED)
def scatter_view(
    semantics: Semantics, x: Value, source: Value, *args: Any, **kwargs: Any
) -> Tensor:
    """Write one tensor into a region of another."""
    operation = getattr(aten, semantics.place.op.removeprefix("aten."))
    target, written = semantics.activation(x), semantics.activation(source)
    return compress(operation(target.contiguous(), written, *args, **kwargs))


@rule("aten.copy", kind="write", **MOVED)
def copy(semantics: Semantics, x: Value, source: Value, *args: Any) -> Tensor:
    """The source, broadcast to the target."""
    return semantics.activation(source).expand(x.shape)


@rule("aten.tril", "aten.triu", kind="choice", **MOVED)
def triangle(semantics: Semantics, x: Value, diagonal: int = 0) -> Value:
    """One triangle of a matrix; the other is exactly zero."""
    lower = "tril" in semantics.place.op
    kept = torch.ones(x.shape[-2:], dtype=torch.bool)
    kept = kept.tril(diagonal) if lower else kept.triu(diagonal)
    if isinstance(x, Weight):
        return x.masked(kept.expand(x.shape))
    return torch.where(kept, x, NEUTRAL)


# --- splitting and joining


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
