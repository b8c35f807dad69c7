"""Operations that only move data: they are run on the ids themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.inference.registry import rule
from pathspace.inference.semantics import Semantics
from pathspace.inference.values import NEUTRAL, ROOT, Value, Weight, constant, move

aten = torch.ops.aten


@rule("aten.relu", "aten.relu_", "aten.leaky_relu", "aten.leaky_relu_",
      "aten.dropout", "aten.dropout_", "aten.feature_dropout",
      "aten.detach", "aten.detach_", "aten.clone", "aten.contiguous", "aten.alias",
      "aten.neg", "aten.neg_", "aten.abs", "aten.lift_fresh_copy", "aten.positive",
      "aten.rrelu", "aten.rrelu_", "aten.float", "aten.double")  # fmt: skip
def homogeneous(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """``f(c x) = c f(x)`` elementwise for ``c > 0`` (or ``|f|`` for scales): the ids stay."""
    return x


@rule("aten.to", "aten._to_copy", "aten.type_as")
def convert(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Another floating point type or device keeps scales; rounding to integers does not."""
    if semantics.place.result.dtype.is_floating_point:
        return x
    semantics.pin([x], "rounding is not homogeneous")
    return constant(x.shape)


def _run(name: str, values: Value, *args: Any, **kwargs: Any) -> Any:
    operation = getattr(aten, name)
    return lambda ids: operation(ids, *args, **kwargs)


def _movement(name: str) -> None:
    @rule(f"aten.{name}")
    def moved(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
        return semantics.moved(_run(name, x, *args, **kwargs), x)


for _name in [
    "view",
    "reshape",
    "_unsafe_view",
    "view_as",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "permute",
    "transpose",
    "t",
    "numpy_T",
    "mT",
    "expand",
    "expand_as",
    "select",
    "slice",
    "narrow",
    "diagonal",
    "movedim",
    "moveaxis",
    "swapaxes",
    "swapdims",
    "flip",
    "roll",
    "rot90",
    "pixel_shuffle",
    "pixel_unshuffle",
    "channel_shuffle",
    "native_channel_shuffle",
    "repeat",
    "repeat_interleave",
    "tile",
    "unfold",
    "broadcast_to",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "as_strided",
    "adjoint",
    "ravel",
]:
    _movement(_name)


@rule("aten.view_as", "aten.reshape_as", "aten.expand_as")
def like(semantics: Semantics, x: Value, other: Value) -> Value:
    """Reshape or expand to the other's shape, whose own scale does not matter."""
    if len(x.shape) <= len(other.shape) and tuple(torch.broadcast_shapes(x.shape, other.shape)) == tuple(other.shape):
        return semantics.moved(lambda ids: ids.expand(other.shape), x)
    return semantics.moved(lambda ids: ids.reshape(other.shape), x)


def _part(operation: Any, i: int, args: Any, kwargs: Any) -> Any:
    return lambda ids: operation(ids, *args, **kwargs)[i]


def _pieces(name: str) -> None:
    @rule(f"aten.{name}")
    def pieces(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
        operation = getattr(aten, name)
        if isinstance(x, Weight):
            shown = operation(torch.empty(x.shape, device="meta"), *args, **kwargs)
            return tuple(x.moved(_part(operation, i, args, kwargs), semantics.offsets) for i in range(len(shown)))
        return tuple(operation(x, *args, **kwargs))


for _name in [
    "split",
    "split_with_sizes",
    "chunk",
    "unbind",
    "tensor_split",
    "unsafe_split",
    "unsafe_chunk",
    "unsafe_split_with_sizes",
    "hsplit",
    "vsplit",
]:
    _pieces(_name)


def _gathered(semantics: Semantics, values: Sequence[Value], operation: Any) -> Value:
    """Concatenate: parameters among themselves stay parameters, mixed with activations they become activations."""
    if all(isinstance(value, Weight) for value in values):
        dense = [value.positions(semantics.offsets) for value in values if isinstance(value, Weight)]
        return Weight(None, operation(dense))
    ids = [semantics.activation(value) for value in values]
    stacked = operation(ids)
    return move(lambda _: stacked, ids[0])


@rule("aten.cat", "aten.concat", "aten.concatenate")
def cat(semantics: Semantics, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation along a dimension."""
    # torch lets empty one-dimensional tensors take part in any concatenation
    kept = [t for t in tensors if tuple(t.shape) != (0,)] or list(tensors)
    return _gathered(semantics, kept, lambda parts: torch.cat(parts, dim))


@rule("aten.stack")
def stack(semantics: Semantics, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Stacking along a new dimension."""
    return _gathered(semantics, tensors, lambda parts: torch.stack(parts, dim))


@rule(
    "aten.pad",
    "aten.constant_pad_nd",
    "aten.reflection_pad1d",
    "aten.reflection_pad2d",
    "aten.replication_pad1d",
    "aten.replication_pad2d",
)
def pad(semantics: Semantics, x: Value, padding: Sequence[int], mode: Any = "constant", value: Any = None) -> Value:
    """Padding with zeros leaves scales free; another constant has a fixed one; reflections move data."""
    ids = semantics.activation(x)
    if not isinstance(mode, str):
        mode, value = "constant", mode
    name = semantics.place.op
    if "reflection" in name or "replication" in name:
        mode = "reflect" if "reflection" in name else "replicate"
    if mode == "constant":
        fill = NEUTRAL if value in (None, 0, 0.0, float("inf"), float("-inf")) else ROOT
        return move(lambda t: torch.nn.functional.pad(t, list(padding), value=fill), ids)
    # torch pads floating point tensors only in these modes; ids below 2**53 survive the way there and back
    lead = (None,) * max(0, 2 + len(padding) // 2 - ids.dim())

    def padded(t: Tensor) -> Tensor:
        numbers = torch.nn.functional.pad(t[lead].double(), list(padding), mode=mode).long()
        return numbers.reshape(numbers.shape[len(lead) :])

    return move(padded, ids)


@rule("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.zero", "aten.zero_")
def zeros(semantics: Semantics, *args: Any, **kwargs: Any) -> Tensor:
    """Exact zeros have whatever scale one likes."""
    first = args[0]
    if isinstance(first, Tensor | Weight) and semantics.place.op == "aten.new_zeros":
        return constant(args[1], NEUTRAL)
    return constant(first.shape if isinstance(first, Tensor | Weight) else first, NEUTRAL)


@rule("aten.full", "aten.full_like", "aten.new_full", "aten.scalar_tensor")
def full(semantics: Semantics, *args: Any, **kwargs: Any) -> Tensor:
    """A constant; zero and infinity have any scale."""
    if semantics.place.op == "aten.scalar_tensor":
        shape, fill = (), args[0]
    elif semantics.place.op == "aten.full":
        shape, fill = args[0], args[1]
    elif semantics.place.op == "aten.full_like":
        shape, fill = args[0].shape, args[1]
    else:
        shape, fill = args[1], args[2]
    return semantics.activation(fill).expand(tuple(shape))


@rule("aten.slice_scatter", "aten.select_scatter")
def scatter_view(semantics: Semantics, x: Value, source: Value, *args: Any, **kwargs: Any) -> Tensor:
    """Write one tensor into a region of another."""
    operation = getattr(aten, semantics.place.op.removeprefix("aten."))
    target, written = semantics.activation(x), semantics.activation(source)
    return move(lambda t: operation(t.contiguous(), written, *args, **kwargs), target)


@rule("aten.copy", "aten.copy_")
def copy(semantics: Semantics, x: Value, source: Value, *args: Any) -> Tensor:
    """The source, broadcast to the target."""
    return semantics.activation(source).expand(x.shape)


@rule("aten.fill", "aten.fill_")
def fill(semantics: Semantics, x: Value, value: Any) -> Tensor:
    """A constant in the shape of the target."""
    return semantics.activation(value).expand(x.shape)


@rule("aten.sym_size", "aten.size", "aten.sym_numel")
def size(semantics: Semantics, x: Value, dim: int | None = None) -> Any:
    """Sizes are plain numbers."""
    return x.shape if dim is None else x.shape[dim]


@rule("aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range_for_size")
def nothing(semantics: Semantics, *args: Any, **kwargs: Any) -> None:
    """Checks touch no scale."""
