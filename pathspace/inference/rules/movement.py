"""Operations that only move data, split a tensor or join several: they are applied to the ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..registry import rule, state
from ..semantics import Semantics
from ..values import NEUTRAL, Value, Weight, along, compress, reshape_groups, reshaped
from .edges import arguments_of

aten = torch.ops.aten
# properties of every movement of data
MOVED: dict[str, Any] = {"degree": (1,), "linear": "jointly", "coefficients": "one"}


def _forms(names: str) -> list[str]:
    return [f"aten.{name}{end}" for name in names.split() for end in ("", "_copy")]


def _operation(semantics: Semantics) -> Any:
    return getattr(aten, semantics.place.op.removeprefix("aten.").removesuffix("_copy"))


@rule(*_forms("squeeze unsqueeze permute transpose t movedim swapaxes channel_shuffle"),
      kind="movement", **MOVED)  # fmt: skip
@rule(*_forms("select slice narrow diagonal"), kind="part", **MOVED)
@rule(*_forms("unfold"), kind="repetition", **MOVED)
@rule("aten.pixel_shuffle", kind="upsampling", **MOVED)
@rule("aten.pixel_unshuffle", kind="resampling", **MOVED)
def same_elements(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """The same elements, or a part of them, at other places."""
    operation = _operation(semantics)
    return semantics.moved(lambda ids: operation(ids, *args, **kwargs), x)


state("aten.roll", "aten.numpy_T", "aten.mT", kind="movement", **MOVED)


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
    return semantics.moved(lambda t: t.contiguous().as_strided(*args, **kwargs), x)


@rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten",
      "aten.view_as", "aten.reshape_as", "aten.ravel", "aten.view_copy", kind="movement",
      **MOVED)  # fmt: skip
def reshape(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Another shape for the same elements."""
    if any(isinstance(arg, torch.dtype) for arg in args):
        raise ValueError("bits read as another type")
    shape = semantics.place.shape
    out = semantics.moved(lambda ids: reshaped(ids, shape), x)
    semantics.regrouped(out, [new for _, new in reshape_groups(x.shape, shape) if len(new) > 1])
    return out


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to", kind="repetition", **MOVED)
def expand(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """The same elements many times."""
    shape = semantics.place.shape
    return semantics.moved(lambda ids: ids.expand(shape), x)


@rule("aten.repeat", kind="repetition", **MOVED)
def repeat(semantics: Semantics, x: Value, times: Sequence[int]) -> Value:
    """Repetition, as an expansion and a reshape."""
    shape = semantics.place.shape
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
        lambda ids: along(lambda t: t.flip(list(dims)), dims, ids) if ids.dim() else ids, x
    )


@rule("aten.repeat_interleave", kind="repetition", **MOVED)
def repeat_interleave(
    semantics: Semantics, x: Value, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Value:
    """Each element several times in a row."""
    if dim is None:
        x, dim = semantics.moved(lambda ids: ids.reshape(-1), x), 0
    if not isinstance(repeats, int):
        # (the graph does not know how often each is there)
        ids = semantics.reduce(x, [dim], keepdim=True)
        return ids.expand(semantics.place.shape)
    return semantics.moved(
        lambda ids: along(lambda t: t.repeat_interleave(repeats, dim), [dim], ids), x
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
    fill = int(semantics.activation(value or 0))
    if fill == NEUTRAL and semantics.uniform:
        ids, padding = _widened(ids, padding)
    return along(lambda t: torch.nn.functional.pad(t, list(padding), value=fill), touched, ids)


@rule("aten.slice_scatter", "aten.select_scatter", "aten.diagonal_scatter", kind="write", **MOVED)
def scatter_view(
    semantics: Semantics, x: Value, source: Value, *args: Any, **kwargs: Any
) -> Tensor:
    """Write one tensor into a region of another."""
    target, written = semantics.activation(x), semantics.activation(source)
    return compress(_operation(semantics)(target.contiguous(), written, *args, **kwargs))


@rule("aten.copy", kind="write", **MOVED)
def copy(semantics: Semantics, x: Value, source: Value, *args: Any) -> Tensor:
    """The source, broadcast to the target."""
    return semantics.activation(source).expand(x.shape)


@rule("aten.tril", "aten.triu", kind="choice", **MOVED)
def triangle(semantics: Semantics, x: Value, diagonal: int = 0) -> Value:
    """One triangle of a matrix; the other is exactly zero."""
    kept = _operation(semantics)(torch.ones(x.shape[-2:], dtype=torch.bool), diagonal)
    if isinstance(x, Weight):
        return x.masked(kept.expand(x.shape))
    return torch.where(kept, x, NEUTRAL)


# --- splitting and joining


@rule("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.tensor_split",
      kind="split", **MOVED)  # fmt: skip
def pieces(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
    """A tensor in parts along a dimension."""
    operation = _operation(semantics)
    if isinstance(x, Weight):
        count = len(semantics.place.result)
        part = [lambda t, i=i: operation(t, *args, **kwargs)[i] for i in range(count)]
        return tuple(x.moved(function, semantics.offsets) for function in part)
    parts = tuple(operation(x, *args, **kwargs))
    if len(parts) > 1 and x.dim() == parts[0].dim() and len({part.shape for part in parts}) == 1:
        dim = arguments_of(semantics, x, *args, **kwargs)["dim"] % x.dim()
        semantics.regrouped(x.unflatten(dim, (len(parts), -1)), [range(dim, dim + 2)])
    return parts


def _gathered(semantics: Semantics, values: Sequence[Value], dim: int) -> Value:
    """Concatenate: parameters give a parameter; parameters and activations give an activation."""
    if all(
        isinstance(value, Weight) and value.kept is None and not value.shift for value in values
    ):
        dense = [
            value.positions(semantics.offsets) for value in values if isinstance(value, Weight)
        ]
        return Weight(None, torch.cat(dense, dim))
    return along(lambda *parts: torch.cat(parts, dim), [dim], *map(semantics.activation, values))


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
