"""Reductions over dimensions: elements that are summed, sorted or compared must share one scale."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..registry import rule, state
from ..semantics import Semantics
from ..values import Value, Weight, constant, distinct, shape_of
from .edges import EPS, arguments_of, times, with_positions
from .pointwise import looked_at, rational_power

# largest number of factors in a product over a dimension
FACTORS = 64


def _dims(semantics: Semantics, x: Value, args: Any, kwargs: dict[str, Any]) -> list[int]:
    """The dimensions along which an operation goes: its argument of this name, or all."""
    dims = arguments_of(semantics, x, *args, **kwargs).get("dim")
    return [dims] if isinstance(dims, int) else list(dims or range(len(x.shape)))


def _shared(semantics: Semantics, x: Value, dims: Sequence[int], shown: Any) -> Tensor:
    shape = shape_of(shown)
    return semantics.reduce(x, dims, keepdim=len(shape) == len(x.shape)).expand(shape)


@rule("aten.sum", kind="total", degree=(1,), linear="jointly", coefficients="one")
@rule("aten.mean", kind="mean", degree=(1,), linear="jointly", coefficients="positive")
@rule("aten.amax", "aten.amin", kind="order", degree=(1,))
def reduce_dims(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Sum, mean, maximum or minimum over dimensions."""
    return _shared(semantics, x, _dims(semantics, x, args, kwargs), semantics.place.result)


@rule("aten.max", "aten.min", "aten.median", "aten.nanmedian", "aten.mode", "aten.kthvalue",
      "aten.cummax", "aten.cummin", "aten.topk", "aten.sort", kind="order",
      degree=(1,))  # fmt: skip
def extreme(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Order statistics along a dimension or of two tensors, and positions."""
    shown, name = semantics.place.result, semantics.place.op.removeprefix("aten.")
    if args and isinstance(args[0], Tensor | Weight):
        return semantics.join(x, args[0])
    dims = _dims(semantics, x, args, kwargs)
    if isinstance(shown, Tensor):
        return _shared(semantics, x, dims, shown)
    values, positions = (_shared(semantics, x, dims, part) for part in shown)
    if name in ("cummax", "cummin") and not semantics.uniform:
        values = _prefixes(semantics, semantics.activation(x), dims[0])
    return with_positions(semantics, values, positions)


def _prefixes(semantics: Semantics, ids: Tensor, dim: int) -> Tensor:
    """Each element joined with all before it along a dimension: no path leads back."""
    if not ids.dim() or not ids.shape[dim]:
        return ids
    steps = [ids.select(dim, 0)]
    for i in range(1, ids.shape[dim]):
        steps.append(semantics.join(steps[-1], ids.select(dim, i)))
    return torch.stack(steps, dim)


@rule("aten.argmax", "aten.argmin", "aten.any", kind="comparison", degree=(0,))
def position(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Positions and counts, which do not depend on the scale if the compared elements share one."""
    if semantics.place.op == "aten.any":
        return looked_at(semantics, x)
    semantics.observe(semantics.reduce(x, _dims(semantics, x, args, kwargs)))
    return constant(semantics.place.shape)


@rule("aten.cumsum", kind="transform", degree=(1,), linear="jointly", coefficients="one")
def running(semantics: Semantics, x: Value, dim: int, **kwargs: Any) -> Tensor:
    """Running sums along a dimension."""
    if not semantics.uniform:
        return _prefixes(semantics, semantics.activation(x), dim)
    return _shared(semantics, x, [dim], semantics.place.result)


@rule("aten.prod", kind="contraction")
def product(
    semantics: Semantics, x: Value, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Tensor:
    """A product over a dimension: log-scales of factors add up."""
    ids = semantics.activation(x)
    if dim is None:
        ids, dim = ids.reshape(-1), 0
    count = ids.shape[dim]
    if not count:
        # (a product of nothing is one)
        return constant(semantics.place.shape)
    if not bool((distinct(ids) == 0).all()) and count > FACTORS:
        raise ValueError(f"a product of {count} factors")
    total = ids.select(dim, 0)
    for i in range(1, count):
        total = times(semantics, total, ids.select(dim, i))
    return total.unsqueeze(dim) if keepdim else total


# --- spread


@rule("aten.linalg_vector_norm", "aten.norm", kind="norm", rotations=True)
def vector_norm(
    semantics: Semantics, x: Value, order: Any = 2, *args: Any, **kwargs: Any
) -> Tensor:
    """Norms have the scale of their operand; of order 0, they count the entries that are not 0."""
    shown = semantics.place.result
    if order == 0:
        semantics.observe(semantics.activation(x))
        return constant(shape_of(shown))
    return _shared(semantics, x, _dims(semantics, x, (order, *args), kwargs), shown)


@rule("aten.var", "aten.std", "aten.var_mean", kind="norm")
def std_or_var(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Standard deviations have the scale of their operand, variances its square."""
    name, shown = semantics.place.op, semantics.place.result
    first = shown if isinstance(shown, Tensor) else shown[0]
    mean = _shared(semantics, x, _dims(semantics, x, args, kwargs), first)
    wide = rational_power(semantics, mean, Fraction(2)) if "var" in name else mean
    return wide if isinstance(shown, Tensor) else (wide, mean)


@rule("aten.cdist", "aten._cdist_forward", kind="norm")
def distances(
    semantics: Semantics, x: Value, y: Value, p: float = 2.0, *args: Any, **kwargs: Any
) -> Tensor:
    """Distances between all pairs of rows; for ``p = 0``, how many entries differ."""
    if p == 0:
        raise ValueError("numbers of different entries")
    left, right = semantics.reduce(x, [-1], keepdim=True), semantics.reduce(y, [-1], keepdim=True)
    return semantics.join(left, right.transpose(-1, -2)).expand(semantics.place.shape)


@rule("aten.cosine_similarity", kind="normalisation")
def cosine_similarity(
    semantics: Semantics, x: Value, y: Value, dim: int = 1, eps: float = 1e-8
) -> Tensor:
    """Angles do not depend on scales, except for ``eps``, the least length."""
    # the dimension is one of the operands broadcast against each other, counted from the end here
    dim -= (len(semantics.place.shape) + 1) * (dim >= 0)
    for value in (x, y):
        own = semantics.activation(value)
        ids = semantics.reduce(own, [dim]) if own.dim() >= -dim else own
        if eps > EPS or semantics.exact_norms:
            semantics.pin([ids], "lengths are kept above eps")
        semantics.observe(ids)
        semantics.approximate.append(ids)
    return constant(semantics.place.shape)


state(*(f"aten.fft_{kind}{rank}" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
        for rank in ("", "2", "n")), kind="transform", degree=(1,), linear="jointly")  # fmt: skip


@rule("aten._fft_r2c", "aten._fft_c2c", kind="transform", degree=(1,), linear="jointly")
@rule("aten._fft_c2r", kind="transform")
def fourier_inside(semantics: Semantics, x: Value, dims: Sequence[int], *args: Any) -> Tensor:
    """Fourier transforms inside of others, such as those of windows of a signal."""
    return _shared(semantics, x, dims, semantics.place.result)
