"""Operations that only move data: they are applied to the ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.inference.eps_detection import may_be_infinite
from pathspace.inference.registry import rule
from pathspace.inference.semantics import Semantics
from pathspace.inference.values import (
    NEUTRAL,
    ROOT,
    Value,
    Weight,
    along,
    compress,
    constant,
    groups,
    reshaped,
    shape_of,
)

aten = torch.ops.aten


@rule("aten.relu", "aten.relu_", kind="activation", degree=(1,), elementwise=True, slope=1.0)
@rule(
    "aten.leaky_relu",
    "aten.leaky_relu_",
    "aten.rrelu",
    "aten.rrelu_",
    "aten.rrelu_with_noise",
    "aten.rrelu_with_noise_functional",
    kind="activation",
    degree=(1,),
    elementwise=True,
)
@rule(
    "aten.dropout",
    "aten.dropout_",
    "aten.feature_dropout",
    "aten.feature_dropout_",
    kind="dropout",
    degree=(1,),
    elementwise=True,
)
@rule(
    "aten.abs",
    "aten.abs_",
    "aten.absolute",
    kind="magnitude",
    degree=(1,),
    elementwise=True,
    slope=1.0,
)
@rule(
    "aten.neg",
    "aten.neg_",
    "aten.negative",
    kind="combination",
    degree=(1,),
    linear="jointly",
    elementwise=True,
)
@rule(
    "aten.detach",
    "aten.detach_",
    "aten.clone",
    "aten.contiguous",
    "aten.alias",
    "aten.lift_fresh",
    "aten.lift_fresh_copy",
    "aten.positive",
    "aten.float",
    "aten.double",
    "aten.half",
    "aten.resolve_neg",
    "aten.requires_grad_",
    kind="copy",
    degree=(1,),
    linear="jointly",
    coefficients="one",
    elementwise=True,
)
@rule("aten.to", "aten._to_copy", "aten.type_as", kind="copy", elementwise=True)
@rule("aten.real", "aten.imag", "aten.conj", "aten._conj", "aten.resolve_conj", kind="complex",
      degree=(1,), elementwise=True)  # fmt: skip
def homogeneous(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Any:
    """``f(c x) = c f(x)`` elementwise for ``c > 0`` (or the same for
    ``|f|``): the ids do not change.
    """
    shown = semantics.place.result
    if isinstance(shown, tuple | list):
        return (x, *(constant(shape_of(other)) for other in shown[1:]))
    return x


@rule("aten.nan_to_num", "aten.nan_to_num_", kind="choice", elementwise=True)
def nan_to_num(semantics: Semantics, x: Value, *given: Any, **named: Any) -> Value:
    """Replace NaN and infinities; 0 and infinity have any scale, every
    other number has a fixed one.

    By default the largest number of the type replaces infinities, so it matters whether the
    operand can be infinite.
    """
    numbers = dict(zip(("nan", "posinf", "neginf"), given, strict=False)) | named
    fixed = any(number and math.isfinite(number) for number in numbers.values())
    default = any(numbers.get(name) is None for name in ("posinf", "neginf"))
    node = semantics.place.node
    if fixed or (default and (node is None or may_be_infinite(node, semantics.sources))):
        return semantics.opaque(
            [semantics.activation(x)], "numbers that stand for NaN or infinity are constants"
        )
    return x


@rule("aten.native_dropout", kind="dropout", degree=(1,), elementwise=True)
def native_dropout(semantics: Semantics, x: Value, *args: Any) -> Any:
    """Dropout that returns its mask."""
    return x, constant(x.shape)


@rule("aten.alpha_dropout", "aten.alpha_dropout_", "aten.feature_alpha_dropout",
      "aten.feature_alpha_dropout_", kind="dropout", elementwise=True)  # fmt: skip
def alpha_dropout(semantics: Semantics, x: Value, p: float = 0.5, train: bool = False) -> Value:
    """Alpha dropout, which adds constants to dropped elements in training, and
    has no effect otherwise.
    """
    if p and train:
        semantics.pin([semantics.activation(x)], "alpha dropout adds constants")
    return x


# --- views


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


_movement(
    "movement",
    "squeeze",
    "unsqueeze",
    "permute",
    "transpose",
    "t",
    "numpy_T",
    "mT",
    "mH",
    "adjoint",
    "matrix_H",
)
_movement(
    "movement",
    "movedim",
    "moveaxis",
    "swapaxes",
    "swapdims",
    "channel_shuffle",
    "native_channel_shuffle",
)
_movement("movement", "rot90", "fliplr", "flipud", "atleast_1d", "atleast_2d", "atleast_3d")
_movement("part", "select", "slice", "narrow", "diagonal")
_movement("repetition", "unfold")
_movement("upsampling", "pixel_shuffle")
_movement("resampling", "pixel_unshuffle")


@rule("aten.diag", "aten.diag_embed", kind="part", **MOVED)
def diagonal_matrix(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """The diagonal of a matrix, or a diagonal matrix with exact zeros elsewhere."""
    operation = getattr(aten, semantics.place.op.removeprefix("aten."))
    if semantics.place.op == "aten.diag" and len(x.shape) == 2:
        return semantics.moved(lambda ids: operation(ids, *args, **kwargs), x)
    # (zeros are not a view of a parameter's scalars)
    ids, kept = (
        semantics.activation(x),
        operation(torch.ones(x.shape, dtype=torch.bool), *args, **kwargs),
    )
    return compress(torch.where(kept, operation(ids, *args, **kwargs), NEUTRAL))


@rule("aten.as_strided", "aten.as_strided_copy", kind="part")
@rule("aten.as_strided_scatter", kind="write")
def as_strided(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Elements selected by their position in memory, for tensors that are contiguous in memory."""
    node = semantics.place.node
    real = None if node is None else node.all_input_nodes[0].meta.get("val")
    if not isinstance(real, Tensor) or not real.is_contiguous() or real.storage_offset():
        raise ValueError("memory with another layout")
    if semantics.place.op == "aten.as_strided_scatter":
        return scatter_view(semantics, x, *args, **kwargs)
    if isinstance(x, Weight):
        return x.moved(lambda t: t.contiguous().as_strided(*args, **kwargs), semantics.offsets)
    return semantics.moved(lambda ids: ids.contiguous().as_strided(*args, **kwargs), x)


@rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten",
      "aten.view_as",
      "aten.reshape_as", "aten.ravel", "aten.view_copy", "aten._reshape_alias", kind="movement",
      **MOVED)  # fmt: skip
def reshape(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Another shape for the same elements."""
    if any(isinstance(arg, torch.dtype) for arg in args):
        raise ValueError("bits read as another type")
    shape = shape_of(semantics.place.result)
    out = semantics.moved(lambda ids: reshaped(ids, shape), x)
    semantics.regrouped(out, [new for _, new in groups(x.shape, shape) if len(new) > 1])
    return out


@rule(
    "aten.expand",
    "aten.expand_as",
    "aten.expand_copy",
    "aten.broadcast_to",
    kind="repetition",
    **MOVED,
)
def expand(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Value:
    """The same elements many times."""
    shape = shape_of(semantics.place.result)
    return semantics.moved(lambda ids: ids.expand(shape), x)


@rule("aten.repeat", "aten.tile", kind="repetition", **MOVED)
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


def _along(*names: str) -> Callable[..., Any]:
    def register(function: Callable[..., Sequence[int]]) -> Callable[..., Any]:
        for name in names:

            @rule(f"aten.{name}", kind="movement", **MOVED)
            def moved(
                semantics: Semantics, x: Value, *args: Any, __name: str = name, **kwargs: Any
            ) -> Value:
                operation, dims = getattr(aten, __name), function(x, *args, **kwargs)
                return semantics.moved(
                    lambda ids: (
                        along(lambda t: operation(t, *args, **kwargs), ids, dims)
                        if ids.dim()
                        else ids
                    ),
                    x,
                )

        return function

    return register


@_along("flip")
def _flip(x: Value, dims: Sequence[int]) -> Sequence[int]:
    return dims


@_along("roll")
def _roll(x: Value, shifts: Any, dims: Sequence[int] | int = ()) -> Sequence[int]:
    found = [dims] if isinstance(dims, int) else list(dims)
    return found or range(len(x.shape))


@rule("aten.repeat_interleave", kind="repetition", **MOVED)
def repeat_interleave(
    semantics: Semantics, x: Value, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Value:
    """Each element several times in a row."""
    if not isinstance(repeats, int):
        ids = semantics.reduce(x, range(len(x.shape)) if dim is None else [dim], keepdim=True)
        return (
            ids.reshape(()).expand(shape_of(semantics.place.result))
            if dim is None
            else _fill(semantics, ids)
        )
    if dim is None:
        return semantics.moved(lambda ids: ids.reshape(-1).repeat_interleave(repeats), x)
    return semantics.moved(
        lambda ids: along(lambda t: t.repeat_interleave(repeats, dim), ids, [dim]), x
    )


def _fill(semantics: Semantics, ids: Tensor) -> Tensor:
    return ids.expand(shape_of(semantics.place.result))


# --- several operands


def _cut_along(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """The dimension that was split into several parts, if these are equal."""
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
            operation = getattr(aten, __name)
            if isinstance(x, Weight):
                count = len(operation(torch.empty(x.shape, device="meta"), *args, **kwargs))
                part = [lambda t, i=i: operation(t, *args, **kwargs)[i] for i in range(count)]
                return tuple(x.moved(function, semantics.offsets) for function in part)
            parts = tuple(operation(x, *args, **kwargs))
            dim = _cut_along(x, parts)
            if dim is not None:
                semantics.regrouped(x.unflatten(dim, (len(parts), -1)), [range(dim, dim + 2)])
            return parts


_pieces(
    "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk"
)
_pieces(
    "unsafe_split_with_sizes",
    "hsplit",
    "vsplit",
    "dsplit",
    "split_with_sizes_copy",
    "split_copy",
    "unbind_copy",
)


def concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
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
    return concatenated([semantics.activation(value) for value in values], dim)


@rule("aten.cat", "aten.concat", "aten.concatenate", kind="concatenation", **MOVED)
def cat(semantics: Semantics, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation along a dimension."""
    # torch ignores empty one-dimensional tensors in a concatenation
    kept = [t for t in tensors if tuple(t.shape) != (0,)] or list(tensors)
    return _gathered(semantics, kept, dim)


@rule(
    "aten.stack",
    "aten.hstack",
    "aten.vstack",
    "aten.dstack",
    "aten.column_stack",
    kind="concatenation",
    **MOVED,
)
def stack(semantics: Semantics, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Stacking along a new dimension."""
    if semantics.place.op != "aten.stack":
        raise ValueError("stacking along a dimension that depends on the shapes")
    rank = len(tensors[0].shape) + 1
    dim %= rank
    return _gathered(
        semantics, [semantics.moved(lambda t: t.unsqueeze(dim), value) for value in tensors], dim
    )


@rule("aten.meshgrid", kind="repetition", **MOVED)
def meshgrid(semantics: Semantics, tensors: Sequence[Value], indexing: str = "ij") -> Any:
    """Coordinates of a grid."""
    return tuple(
        torch.meshgrid(*(semantics.activation(value) for value in tensors), indexing=indexing)
    )


def _widened(ids: Tensor, padding: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Give narrow margins of large images the scale of their interior (zeros have any scale).

    Wide margins remain zeros, because some taps may read only the margin.
    """
    rest, sizes = list(padding), list(ids.shape)
    margins = {
        ids.dim() - 1 - i: padding[2 * i] + padding[2 * i + 1] for i in range(len(padding) // 2)
    }
    # channels come before height and width, or after them
    places = (
        (1, 2)
        if ids.dim() == 4 and margins.get(1) and margins.get(2) and not margins.get(3)
        else range(2, ids.dim())
    )
    for dim, margin in margins.items():
        sides = slice(2 * (ids.dim() - 1 - dim), 2 * (ids.dim() - dim))
        if (
            dim in places
            and ids.stride(dim) == 0
            and ids.shape[dim] > 4 * margin > 0
            and min(rest[sides]) >= 0
        ):
            rest[sides] = [0, 0]
            ids, sizes[dim] = ids.narrow(dim, 0, 1), ids.shape[dim] + margin
    return ids.expand(sizes), rest


@rule("aten.pad", "aten.constant_pad_nd",
      *(f"aten.{kind}_pad{rank}d" for kind in ("reflection", "replication")
                                            for rank in (1, 2, 3)), kind="padding",
                                            **MOVED)  # fmt: skip
def pad(
    semantics: Semantics,
    x: Value,
    padding: Sequence[int],
    mode: Any = "constant",
    value: Any = None,
) -> Value:
    """Padding: zeros have any scale, other constants have a fixed one, reflections move data."""
    ids = semantics.activation(x)
    if not isinstance(mode, str):
        mode, value = "constant", mode
    name = semantics.place.op
    if "reflection" in name or "replication" in name:
        mode = "reflect" if "reflection" in name else "replicate"
    touched = [ids.dim() - 1 - i for i in range(len(padding) // 2)]
    if mode == "constant":
        fill = NEUTRAL if value in (None, 0, 0.0, float("inf"), float("-inf")) else ROOT
        if fill == NEUTRAL and semantics.uniform:
            ids, padding = _widened(ids, padding)
        return along(lambda t: torch.nn.functional.pad(t, list(padding), value=fill), ids, touched)
    # torch pads only floating-point tensors in these modes; float64
    # represents ids below 2**53 exactly
    lead = (None,) * max(0, 2 + len(padding) // 2 - ids.dim())

    def padded(t: Tensor) -> Tensor:
        numbers = torch.nn.functional.pad(t[lead].double(), list(padding), mode=mode).long()
        return numbers.reshape(numbers.shape[len(lead) :])

    return along(padded, ids, touched)


@rule("aten.slice_scatter", "aten.select_scatter", "aten.diagonal_scatter", kind="write", **MOVED)
def scatter_view(
    semantics: Semantics, x: Value, source: Value, *args: Any, **kwargs: Any
) -> Tensor:
    """Write one tensor into a region of another."""
    operation = getattr(aten, semantics.place.op.removeprefix("aten."))
    target, written = semantics.activation(x), semantics.activation(source)
    return compress(operation(target.contiguous(), written, *args, **kwargs))


@rule("aten.copy", "aten.copy_", kind="write", **MOVED)
def copy(semantics: Semantics, x: Value, source: Value, *args: Any) -> Tensor:
    """The source, broadcast to the target."""
    return semantics.activation(source).expand(x.shape)


@rule("aten.tril", "aten.triu", "aten.tril_", "aten.triu_", kind="choice", **MOVED)
def triangle(semantics: Semantics, x: Value, diagonal: int = 0) -> Value:
    """One triangle of a matrix; the other is exactly zero."""
    lower = "tril" in semantics.place.op
    kept = torch.ones(x.shape[-2:], dtype=torch.bool)
    kept = kept.tril(diagonal) if lower else kept.triu(diagonal)
    if isinstance(x, Weight):
        return x.masked(kept.expand(x.shape))
    return torch.where(kept, x, NEUTRAL)
