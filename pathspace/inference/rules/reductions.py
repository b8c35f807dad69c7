"""Reductions over dimensions: elements that are summed, sorted or compared must share one scale."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import Value, Weight, compress, constant, distinct, shape_of
from .edges import EPS, negligible, times, with_positions
from .pointwise import looked_at, rational_power

# largest number of factors in a product over a dimension
FACTORS = 64


def _dims(dims: int | Sequence[int] | None, x: Value) -> list[int]:
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(len(x.shape)))
    return [dims] if isinstance(dims, int) else list(dims)


def _shared(semantics: Semantics, x: Value, dims: Any, shown: Any) -> Tensor:
    """One scale along dimensions, expanded to a result in which they may have
    another size, or be missing.
    """
    wanted = {dim % max(len(x.shape), 1) for dim in _dims(dims, x)}
    shape = shape_of(shown)
    ids = semantics.reduce(x, wanted, keepdim=len(shape) == len(x.shape))
    return ids.expand(shape)


@rule("aten.sum", "aten.nansum", kind="total", degree=(1,), linear="jointly", coefficients="one")
@rule(
    "aten.mean", "aten.nanmean", kind="mean", degree=(1,), linear="jointly", coefficients="positive"
)
@rule("aten.amax", "aten.amin", kind="order", degree=(1,))
def reduce_dims(
    semantics: Semantics,
    x: Value,
    dims: Any = None,
    keepdim: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Sum, mean, maximum or minimum over dimensions."""
    dims = kwargs.get("dim", dims)
    return semantics.reduce(x, _dims(dims, x), kwargs.get("keepdim", keepdim))


@rule("aten.max", "aten.min", "aten.median", "aten.nanmedian", "aten.mode", "aten.kthvalue",
      "aten.cummax",
      "aten.cummin", "aten.topk", "aten.sort", "aten.msort", "aten.aminmax", kind="order",
      degree=(1,))  # fmt: skip
def extreme(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Order statistics along a dimension (or between two tensors), and
    positions, which have no scale.
    """
    shown, name = semantics.place.result, semantics.place.op.removeprefix("aten.")
    if args and isinstance(args[0], Tensor | Weight):
        return semantics.join(semantics.activation(x), semantics.activation(args[0]))
    # topk and kthvalue take a count first; sort(stable=...) has only keywords
    place = 1 if name in ("topk", "kthvalue") else 0
    default: Any = (
        -1 if name in ("topk", "kthvalue", "sort", "mode") else 0 if name == "msort" else None
    )
    dim = kwargs.get(
        "dim", args[place] if len(args) > place and not isinstance(args[place], bool) else default
    )
    if isinstance(shown, Tensor):
        return _shared(semantics, x, dim, shown)
    if name == "aminmax":
        return tuple(_shared(semantics, x, dim, part) for part in shown)
    values, positions = (_shared(semantics, x, dim, part) for part in shown)
    if name in ("cummax", "cummin") and not semantics.uniform:
        values = _prefixes(semantics, semantics.activation(x), dim)
    return with_positions(semantics, values, positions)


def _prefixes(semantics: Semantics, ids: Tensor, dim: int) -> Tensor:
    """Each element joined with all before it along a dimension: no path leads back."""
    if not ids.dim() or not ids.shape[dim]:
        return ids
    steps = [ids.select(dim, 0)]
    for i in range(1, ids.shape[dim]):
        steps.append(semantics.join(steps[-1], ids.select(dim, i)))
    return torch.stack(steps, dim)


@rule("aten.quantile", "aten.nanquantile", kind="order", degree=(1,))
def quantile(
    semantics: Semantics,
    x: Value,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Order statistics, and weighted means of two of them."""
    if isinstance(q, Tensor | Weight):
        semantics.pin([q], "it says which quantile is taken")
    return semantics.reduce(x, _dims(dim, x), keepdim).expand(shape_of(semantics.place.result))


@rule("aten.argmax", "aten.argmin", "aten.argsort", "aten.all", "aten.any", "aten.count_nonzero",
      kind="comparison", degree=(0,))  # fmt: skip
def position(semantics: Semantics, x: Value, dim: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Positions and counts, which do not depend on the scale if the compared elements share one."""
    if semantics.place.op in ("aten.all", "aten.any", "aten.count_nonzero"):
        result: Tensor = looked_at(semantics, x)
        return result
    dim = kwargs.get("dim", -1 if dim is None and semantics.place.op == "aten.argsort" else dim)
    semantics.observe(semantics.reduce(x, _dims(None if isinstance(dim, bool) else dim, x)))
    return constant(shape_of(semantics.place.result))


@rule(
    "aten.cumsum",
    "aten.cumsum_",
    kind="transform",
    degree=(1,),
    linear="jointly",
    coefficients="one",
)
@rule("aten.diff", kind="transform", degree=(1,), linear="jointly")
def running(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Tensor:
    """Running sums and differences along a dimension."""
    place = 0 if "cumsum" in semantics.place.op else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    if not semantics.uniform and "cumsum" in semantics.place.op:
        return _prefixes(semantics, semantics.activation(x), dim)
    more = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor | Weight)]
    ids = semantics.reduce(x, [dim], keepdim=True)
    for value in more:
        ids = semantics.join(ids, semantics.reduce(value, [dim], keepdim=True))
    return ids.expand(shape_of(semantics.place.result))


@rule("aten.prod", "aten.cumprod", "aten.cumprod_", kind="contraction", infinite=True)
def product(
    semantics: Semantics, x: Value, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Tensor:
    """A product over a dimension: log-scales of factors add up."""
    ids = semantics.activation(x)
    running = "cum" in semantics.place.op
    if dim is None:
        ids, dim = ids.reshape(-1), 0
    count = ids.shape[dim]
    if not count:
        # (a product of nothing is one)
        return constant(shape_of(semantics.place.result))
    if not bool((distinct(ids) == 0).all()) and count > FACTORS:
        raise ValueError(f"a product of {count} factors")
    total = ids.select(dim, 0)
    steps = [total]
    for i in range(1, count):
        total = times(semantics, total, ids.select(dim, i))
        steps.append(total)
    if running:
        return torch.stack(steps, dim)
    return total.unsqueeze(dim) if keepdim else total


# --- spread


@rule("aten.linalg_vector_norm", "aten.norm", "aten.frobenius_norm", "aten.nuclear_norm",
      "aten.linalg_norm", "aten.linalg_matrix_norm", kind="norm", infinite=True)  # fmt: skip
def vector_or_matrix_norm(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Tensor:
    """Norms have the scale of their operand; of order 0, they count the entries that are not 0."""
    numbers = [arg for arg in args if arg is None or isinstance(arg, int | float | str)]
    order = 2 if "fro" in semantics.place.op or "nuc" in semantics.place.op else (numbers or [2])[0]
    shown = semantics.place.result
    if order == 0:
        semantics.observe(semantics.activation(x))
        return constant(shape_of(shown))
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    dims = kwargs.get(
        "dim", lists[0] if lists else [-2, -1] if "matrix" in semantics.place.op else None
    )
    ids = semantics.reduce(x, _dims(dims, x), keepdim=len(shown.shape) == len(x.shape))
    return ids.reshape(shape_of(shown)) if ids.numel() == 1 else ids


@rule("aten.var", "aten.std", "aten.var_mean", "aten.std_mean", kind="norm")
def std_or_var(semantics: Semantics, x: Value, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Standard deviations have the scale of their operand, variances its square."""
    name, shown = semantics.place.op, semantics.place.result
    first = shown if isinstance(shown, Tensor) else shown[0]
    dims = kwargs.get("dim", None if isinstance(dims, bool) else dims)
    mean = semantics.reduce(
        x, _dims(dims, x), keepdim=len(first.shape) == len(x.shape) and len(x.shape) > 0
    )
    wide = rational_power(semantics, mean, Fraction(2)) if "var" in name else mean
    return wide if isinstance(shown, Tensor) else (wide, mean)


@rule("aten.cdist", "aten._cdist_forward", kind="norm")
def distances(
    semantics: Semantics, x: Value, y: Value, p: float = 2.0, *args: Any, **kwargs: Any
) -> Tensor:
    """Distances between all pairs of rows; for ``p = 0``, how many entries differ."""
    if p == 0:
        semantics.observe(
            semantics.join(
                semantics.activation(x).unsqueeze(-2), semantics.activation(y).unsqueeze(-3)
            )
        )
        return constant(shape_of(semantics.place.result))
    left, right = semantics.reduce(x, [-1], keepdim=True), semantics.reduce(y, [-1], keepdim=True)
    return semantics.join(left, right.transpose(-1, -2)).expand(shape_of(semantics.place.result))


@rule("aten.pdist", "aten._pdist_forward", kind="norm")
def distances_within(semantics: Semantics, x: Value, p: float = 2.0) -> Tensor:
    """Distances between all pairs of rows of one matrix; for ``p = 0``, how many entries differ."""
    ids = semantics.activation(x) if p == 0 else semantics.reduce(x, [-1])
    first, second = torch.triu_indices(ids.shape[0], ids.shape[0], 1)
    pairs = semantics.join(ids[first], ids[second])
    if p == 0:
        semantics.observe(pairs)
        return constant(shape_of(semantics.place.result))
    return compress(pairs)


@rule("aten.pairwise_distance", kind="norm")
def pairwise_distance(
    semantics: Semantics, x: Value, y: Value, p: float = 2.0, eps: float = 1e-6, *args: Any
) -> Tensor:
    """Distances between rows; ``eps`` is added to every difference."""
    ids = semantics.join(semantics.activation(x), semantics.activation(y))
    if eps and not negligible(semantics, eps, ids):
        semantics.pin([ids], "eps is added to differences")
    if p == 0:
        semantics.observe(ids)
        return constant(shape_of(semantics.place.result))
    return _shared(semantics, ids, [-1], semantics.place.result)


@rule("aten.cosine_similarity", kind="normalisation")
def cosine_similarity(
    semantics: Semantics, x: Value, y: Value, dim: int = 1, eps: float = 1e-8
) -> Tensor:
    """Angles do not depend on the scales of the operands, except for ``eps``,
    the lower limit of lengths.
    """
    # the dimension is one of the operands broadcast against each other, counted from the end here
    dim -= (len(shape_of(semantics.place.result)) + 1) * (dim >= 0)
    for value in (x, y):
        own = semantics.activation(value)
        ids = semantics.reduce(own, [dim]) if own.dim() >= -dim else own
        if eps > EPS or semantics.exact_norms:
            semantics.pin([ids], "lengths are kept above eps")
        semantics.observe(ids)
        semantics.approximate.append(ids)
    return constant(shape_of(semantics.place.result))


@rule(
    *(
        f"aten.fft_{kind}{rank}"
        for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
        for rank in ("", "2", "n")
    ),
    kind="transform",
    degree=(1,),
    linear="jointly",
)
def fourier(
    semantics: Semantics, x: Value, size: Any = None, dims: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Fourier transforms mix all elements along their dimensions."""
    name = semantics.place.op
    default = -1 if not name.endswith(("2", "n")) else (-2, -1) if name.endswith("2") else None
    return _shared(
        semantics, x, kwargs.get("dim", default if dims is None else dims), semantics.place.result
    )


@rule("aten._fft_r2c", "aten._fft_c2c", kind="transform", degree=(1,), linear="jointly")
@rule("aten._fft_c2r", kind="transform")
def fourier_inside(semantics: Semantics, x: Value, dims: Sequence[int], *args: Any) -> Tensor:
    """Fourier transforms inside of others, such as those of windows of a signal."""
    return _shared(semantics, x, dims, semantics.place.result)


@rule("aten.istft", kind="transform")
def windows_added(
    semantics: Semantics, x: Value, size: int, *args: Any, window: Any = None, **kwargs: Any
) -> Tensor:
    """A signal from the transforms of its windows, which overlap: divided by the sum of
    the squares of the window.
    """
    # (after the hop and the width of a window)
    dividing = [one for one in (window, *args[2:3]) if one is not None]
    if dividing:
        semantics.pin(dividing, "a window by which the result is divided")
    ids = semantics.reduce(x, [-2, -1], keepdim=True)
    return ids.squeeze(-1).expand(shape_of(semantics.place.result))


@rule(
    "aten.fft_fftshift",
    "aten.fft_ifftshift",
    kind="movement",
    degree=(1,),
    linear="jointly",
    coefficients="one",
)
def shift(semantics: Semantics, x: Value, dims: Any = None) -> Value:
    """A cyclic shift by half of the size, rounded down for ``fftshift`` and up for its inverse."""
    wanted, way = _dims(dims, x), -1 if "ifft" in semantics.place.op else 1
    return semantics.moved(lambda t: t.roll([way * (t.shape[d] // 2) for d in wanted], wanted), x)
