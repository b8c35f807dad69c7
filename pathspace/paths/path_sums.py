"""Sums over the paths that reach every element, and how operations with
known properties pass them on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import InputError
from ..inference.registry import Facts

# sums within these bounds need no common logarithm
SMALLEST, LARGEST = 1e-60, 1e60
# powers of weights above this size are computed some rows at a time, so that they fit
# into the processor's cache
MANY, ROWS = 1 << 20, 32
# the 1 by which a coefficient is measured: beside it, constants that are added do not round
WIDE = 2.0**300
# logarithms of powers of weights beyond this leave the floats, or nearly
RANGE = 690.0
LEFT = (
    "path_norm found sums over paths that leave the floats within one operation, expected a smaller"
    " exponent p, or smaller weights."
)
# a map along one dimension of an image is measured on images of this size
# along the other dimensions
NARROW = 16
Operation = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Sum:
    """Non-negative sums over the paths that reach each element: ``values * exp(log)``."""

    values: Tensor
    log: float = 0.0

    @classmethod
    def of(cls, values: Tensor, log: float = 0.0) -> Sum:
        """Divide by the largest value if it is far from 1, and keep its logarithm."""
        size = float(values.detach().max()) if values.numel() else 0.0
        if math.isinf(size):
            raise InputError(LEFT)
        if size == 0 or SMALLEST < size < LARGEST:
            return cls(values, log if size else 0.0)
        return cls(values / size, log + math.log(size))

    @property
    def is_zero(self) -> bool:
        """Whether no path has a value other than 0."""
        return not bool(self.values.any())

    def at(self, log: float) -> Tensor:
        """The sums divided by ``exp(log)``."""
        return (
            self.values
            if self.log == log
            else self.values * math.exp(max(min(self.log - log, 700.0), -745.0))
        )

    @property
    def total(self) -> float:
        """Logarithm of the sum over all elements."""
        size = float(self.values.sum())
        if math.isnan(size):
            raise InputError(
                "path_norm found sums over paths that are NaN, expected numbers; a buffer or a"
                " constant of the model has NaN in it, or a divisor is 0."
            )
        return math.log(size) + self.log if size > 0 else -math.inf


def common_log(sums: Sequence[Sum]) -> float:
    """The largest logarithm among sums that are not zero."""
    return max((one.log for one in sums if one.log == 0.0 or not one.is_zero), default=0.0)


def added(*sums: Sum) -> Sum:
    """Add sums."""
    log = common_log(sums)
    total = sums[0].at(log)
    for one in sums[1:]:
        total = total + one.at(log)
    return Sum.of(total, log)


def sum_power(one: Sum, exponent: float) -> Sum:
    """A power of sums; 0 where no path arrives, for negative exponents too."""
    size = float(one.values.detach().max()) if one.values.numel() else 0.0
    near = one.values / size if size else one.values
    values = near**exponent
    return Sum.of(
        values if exponent > 0 else torch.where(near == 0, 0.0, values),
        (one.log + (math.log(size) if size else 0.0)) * exponent,
    )


def absolute_power(value: Tensor, p: float) -> Tensor:
    """``|value|^p`` in double precision, and 0 for infinite entries
    (masks), which no path passes.
    """
    # (in place: fresh memory takes longer than the computation)
    size = value.to("cpu", torch.float64, copy=True).abs_()
    if p > 2 or (p > 1 and value.dtype == torch.float64):
        _check_range(size, p)
    size = size if p == 1 else size.square_() if p == 2 else size.pow_(p)
    return size.nan_to_num_(nan=math.nan, posinf=0.0) if value.numel() < MANY else size


def _check_range(size: Tensor, p: float) -> None:
    """Refuse an exponent at which powers of numbers leave the floats."""
    used = (size > 0) & torch.isfinite(size)
    if not bool(used.any()):
        return
    least = float(torch.where(used, size, math.inf).detach().min())
    most = float(torch.where(used, size, 0.0).detach().max())
    if p * math.log(most) > RANGE or p * math.log(least) < -RANGE:
        raise InputError(
            f"path_norm found p={p:g}, at which powers of numbers from {least:.3g} to {most:.3g}"
            f" leave the floats, expected at most p={_largest(least, most):.3g} here."
        )


def _largest(least: float, most: float) -> float:
    return RANGE / max(math.log(most), -math.log(least))


def numbers_raised(tree: Any, p: float) -> Any:
    """Keyword arguments with each number (``alpha``, ``beta``, ``value``)
    replaced by ``|number|^p``.
    """
    return {
        key: abs(v) ** p if isinstance(v, int | float) and not isinstance(v, bool) else v
        for key, v in tree.items()
    }


def is_float_tensor(leaf: Any) -> bool:
    """Whether a value is a tensor of floating-point numbers."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, Sum) or is_float_tensor(leaf)


def wide(leaf: Any) -> Any:
    """A tensor of real or complex numbers in double precision; anything else as it is."""
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return leaf.cpu().to(torch.complex128 if leaf.is_complex() else torch.float64)


def double_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with double precision for a requested type of real numbers."""
    kind = kwargs.get("dtype")
    real = isinstance(kind, torch.dtype) and kind.is_floating_point
    return {**kwargs, "dtype": torch.float64} if real else kwargs


def map_sums(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each leaf of nested arguments; a sum is one leaf."""
    return pytree.tree_map(function, tree, is_leaf=lambda leaf: isinstance(leaf, Sum))


def sum_leaves(tree: Any) -> list[Any]:
    """The leaves of nested arguments; a sum is one leaf."""
    return pytree.tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Sum))


def multiplied(
    run: Operation, facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], p: float
) -> Sum:
    """An operation that is linear in each of its operands: products of paths,
    one through each operand.

    Args:
        run: the operation.
        facts: its properties; the bias is added to the products.
        args: operands, sums and weights.
        kwargs: its keyword arguments.
        p: exponent of the norm.
    """
    logs: list[float] = []

    def prepared(leaf: Any) -> Any:
        if isinstance(leaf, Sum):
            logs.append(leaf.log)
            return leaf.values
        if isinstance(leaf, Tensor):
            # a mask may be 1 everywhere
            return (
                absolute_power(leaf, p)
                if leaf.is_floating_point()
                else torch.ones(leaf.shape, dtype=torch.float64)
            )
        number = (
            isinstance(leaf, int | float) and not isinstance(leaf, bool) and facts.kind == "product"
        )
        return abs(leaf) ** p if number else leaf

    operands, place = list(args), -1 if facts.bias is None else facts.bias
    bias = operands[place] if 0 <= place < len(operands) else None
    if (
        facts.kind == "contraction"
        and len(operands) in (2, 3)
        and facts.bias == 2
        and _is_large(operands[1])
    ):
        product = Sum.of(_by_rows(operands[0], operands[1], p), operands[0].log)
        return product if bias is None else added(product, as_sum(bias, p))
    if bias is not None:
        operands[place] = None
    operands, kwargs = [map_sums(prepared, each) for each in operands], numbers_raised(kwargs, p)
    log = sum(logs)
    if bias is not None:
        more = as_sum(bias, p)
        if abs(more.log - log) > 300:
            # no common logarithm avoids overflow: compute both parts separately
            zeros = [0 * each if isinstance(each, Tensor) else each for each in operands]
            alone = [*zeros[:place], more.values, *zeros[place + 1 :]]
            without = [*operands[:place], 0 * more.values, *operands[place + 1 :]]
            return added(
                Sum.of(run(*without, **kwargs), log), Sum.of(run(*alone, **kwargs), more.log)
            )
        operands[place] = more.at(log)
    return Sum.of(run(*operands, **kwargs), log)


def _is_large(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.numel() > MANY


def _by_rows(x: Any, weight: Tensor, p: float) -> Tensor:
    """``x |W|^p`` without a copy of the whole matrix."""
    rows = torch.empty(*x.values.shape[:-1], len(weight), dtype=torch.float64)
    for start in range(0, len(weight), ROWS):
        rows[..., start : start + ROWS] = (
            x.values @ absolute_power(weight[start : start + ROWS], p).T
        )
    return rows


def jointly_affine_sum(run: Operation, args: Any, kwargs: Any, p: float) -> Sum:
    """An elementwise operation that is jointly affine in its operands: its
    coefficients are measured.

    The coefficient of an operand is the result for 1 in its place and 0 in all others, minus the
    result for 0 in all places. It is one number, or a tensor if weights or masks take part. Every
    place is an operand of its own: ``x - relu(x)`` has the paths of both.
    """
    flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Sum))
    entering = {i: leaf for i, leaf in enumerate(flat) if isinstance(leaf, Sum)}

    def at(chosen: int | None) -> Tensor:
        def value(i: int, leaf: Any) -> Any:
            if isinstance(leaf, Sum):
                return torch.tensor(WIDE if i == chosen else 0.0, dtype=torch.float64)
            return wide(leaf)

        own, named = pytree.tree_unflatten([value(i, leaf) for i, leaf in enumerate(flat)], spec)
        result: Tensor = run(*own, **named)
        found = result.resolve_conj().resolve_neg()
        return torch.nan_to_num(found, nan=math.nan, posinf=0.0, neginf=0.0)

    constant = at(None)
    parts = []
    for i, one in entering.items():
        size = ((at(i) - constant) / WIDE).abs() ** p
        parts.append(
            one if size.dim() == 0 and float(size) == 1 else Sum(one.values * size, one.log)
        )
    if bool(constant.any()):
        parts.append(Sum(constant.abs() ** p))
    result = added(*parts)
    shape = torch.broadcast_shapes(constant.shape, *(one.values.shape for one in entering.values()))
    return Sum(result.values.expand(shape), result.log)


def moved_sums(run: Operation, args: Any, kwargs: Any, p: float, fills: bool) -> Any:
    """An operation whose results are elements of its operands or sums of them; ``fills`` if
    it writes constants too.
    """
    sums = [as_sum(leaf, p) for leaf in sum_leaves((args, kwargs)) if _counts(leaf)]
    log = common_log(sums)

    def value(leaf: Any, factor: float = 1.0) -> Any:
        return factor * as_sum(leaf, p).at(log).contiguous() if _counts(leaf) else leaf

    own, named = map_sums(value, (args, kwargs))
    if not fills:
        return pytree.tree_map(lambda leaf: Sum.of(leaf, log), run(*own, **named))
    empty, unnamed = map_sums(lambda leaf: value(leaf, 0.0), (args, kwargs))
    constant = run(*empty, **unnamed)
    rest = torch.nan_to_num(run(*own, **named) - constant, posinf=0.0, neginf=0.0)
    written = torch.nan_to_num(constant, posinf=0.0, neginf=0.0).abs() ** p
    return added(Sum(rest, log), Sum(written))


def as_sum(leaf: Any, p: float) -> Sum:
    """A tensor of the model as sums over the paths that start in it."""
    return leaf if isinstance(leaf, Sum) else Sum(absolute_power(leaf, p))


def separated(run: Operation, x: Sum, p: float, rank: int) -> Sum:
    """An operation on images that is a product of one map per dimension: apply these
    maps one after the other.

    Let ``r_d[o] = sum_i A_d[o, i]``. Unit vectors along one dimension and ones along all others
    give ``B_d[o, i] = A_d[o, i] prod_(d' != d) r_d'[c]`` at a central position ``c``. The product
    of all ``B_d`` therefore has the factor ``prod_d r_d[c]`` too often: once for every dimension
    but one. For a maximum over windows the same calls give the windows, and all of their elements
    count. The sizes of the other dimensions do not change a map, so small sizes are used.

    Args:
        run: the operation on a tensor of shape (batch, channels, sizes).
        x: sums of that shape.
        p: exponent of the norm.
        rank: number of image dimensions.
    """
    sizes = x.values.shape[-rank:]
    try:
        matrices, norm = _maps(run, sizes, [min(n, NARROW) for n in sizes])
    except RuntimeError:
        # (a window is larger than these sizes)
        matrices, norm = _maps(run, sizes, list(sizes))
    values = x.values
    for d, matrix in enumerate(matrices):
        values = torch.movedim(
            torch.movedim(values, d - rank, -1) @ (matrix / norm).abs() ** p, -1, d - rank
        )
    return Sum.of(values, x.log)


def _maps(run: Operation, sizes: Sequence[int], small: list[int]) -> tuple[list[Tensor], float]:
    """The maps (in, out) along each dimension, and the common factor by which each is too large."""
    rank = len(sizes)
    whole = run(torch.ones((1, 1, *small), dtype=torch.float64))
    middle = [n // 2 for n in whole.shape[2:]]
    matrices = []
    for d, size in enumerate(sizes):
        units = torch.eye(size, dtype=torch.float64).reshape(
            size, 1, *(size if e == d else 1 for e in range(rank))
        )
        units = units.expand(
            size, 1, *(size if e == d else n for e, n in enumerate(small))
        ).contiguous()
        place = [slice(None) if e == d else middle[e] for e in range(rank)]
        matrices.append(run(units)[(slice(None), 0, *place)])
    return matrices, float(whole[(0, 0, *middle)]) ** ((rank - 1) / rank)


def recurrent(
    x: Sum,
    state: Sum,
    weights: Sequence[Any],
    options: Sequence[Any],
    p: float,
    gates: list[Sum] | None = None,
) -> tuple[Sum, Sum]:
    """A recurrent layer, step by step: ``h_t = W_ih x_t + b_ih + W_hh h_(t-1) +
    b_hh`` with weights ``|w|^p``.

    Args:
        x: the sequence.
        state: the first hidden state.
        weights: of all layers and directions.
        options: biases, layers, dropout, training, both directions, batch first.
        p: exponent of the norm.
        gates: a list for the sums that end in gates, if gates fix all scales; hidden
            states then start again at 1.

    Returns:
        The outputs of all steps, and the last hidden states.
    """
    biases, layers, _, _, both, batch_first = options[:6]
    per, ways = (4 if biases else 2), (2 if both else 1)
    time = 1 if batch_first and x.values.dim() == 3 else 0
    steps = [Sum(part, x.log) for part in x.values.unbind(time)]
    last: list[Sum] = []
    for layer in range(layers):
        found: list[list[Sum]] = []
        for way in range(ways):
            number = layer * ways + way
            own = [absolute_power(each, p) for each in weights[number * per : (number + 1) * per]]
            shift = [Sum(own[2] + own[3])] if biases else []
            hidden, seen = Sum(state.values[number], state.log), []
            for step in reversed(steps) if way else steps:
                entered, kept = (
                    Sum(h.values @ w.T, h.log) for h, w in ((step, own[0]), (hidden, own[1]))
                )
                entered = added(entered, kept, *shift)
                if gates is not None:
                    gates.append(entered)
                hidden = entered if gates is None else Sum(torch.ones_like(hidden.values))
                seen.append(hidden)
            last.append(hidden)
            found.append(seen[::-1] if way else seen)
        steps = [
            joined(parts, lambda values: torch.cat(values, -1))
            for parts in zip(*found, strict=True)
        ]
    return joined(steps, lambda values: torch.stack(values, time)), joined(last, torch.stack)


def joined(parts: Sequence[Sum], function: Callable[[list[Tensor]], Tensor]) -> Sum:
    """Several sums in one tensor, with a common logarithm."""
    log = common_log(parts)
    return Sum.of(function([part.at(log) for part in parts]), log)


def each_sum(tree: Any) -> Iterator[Sum]:
    """The sums among nested values."""
    return (leaf for leaf in sum_leaves(tree) if isinstance(leaf, Sum))
