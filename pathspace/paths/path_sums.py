"""Sums over the paths that reach every element, and how linear operations pass them on.

With ``s`` the sum of ``|v|^p`` over the paths to an element: a linear map with coefficients ``a``
gives ``sum |a|^p s``, and a product of operands the product of their sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import InputError, UnsupportedError
from ..inference.registry import Facts
from ..models.isolation import torch_kept

# sums within these bounds need no common logarithm
SMALLEST, LARGEST = 1e-60, 1e60
# powers of a matrix above this size are computed some rows at a time, so that they fit
# into the processor's cache
MANY, ROWS = 1 << 20, 32
# the 1 by which a coefficient is measured: beside it, constants that are added do not round
WIDE = 2.0**300
# logarithms of powers of weights beyond this leave the floats, or nearly
RANGE = 690.0
# a linear map with unknown coefficients is applied to at most this many unit vectors
UNIT_VECTORS = 4096
# random operands of an affine function agree up to this part of the largest number
AGREEMENT = 1e-9
# a map along one dimension of an image is measured on images of this size along the others
NARROW = 16
Operation = Callable[..., Any]


class Chosen(Tensor):
    """Whole numbers and truth values that the inputs decide: known as positions, 1 as numbers."""


class Unknown(Chosen):
    """Those that activations decide: their contents mean nothing."""


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
            raise InputError(
                "path_norm found sums over paths that leave the floats within one operation,"
                " expected a smaller exponent p, or smaller weights."
            )
        if size == 0 or SMALLEST < size < LARGEST:
            return cls(values, log if size else 0.0)
        return cls(values / size, log + math.log(size))

    @classmethod
    def start(cls, shape: Sequence[int]) -> Sum:
        """Elements in which paths start with the value 1."""
        return cls(torch.ones(tuple(shape), dtype=torch.float64))

    def at(self, log: float) -> Tensor:
        """The sums divided by ``exp(log)``."""
        if self.log == log:
            return self.values
        return self.values * math.exp(max(min(self.log - log, 700.0), -745.0))

    def changed(self, function: Callable[[Tensor], Tensor]) -> Sum:
        """The sums after a function that is linear in them."""
        return Sum.of(function(self.values), self.log)

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


def map_sums(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each leaf of nested arguments; a sum is one leaf."""
    return pytree.tree_map(function, tree, is_leaf=lambda leaf: isinstance(leaf, Sum))


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of nested arguments; a sum is one leaf."""
    return pytree.tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Sum))


def each_sum(tree: Any) -> Iterator[Sum]:
    """The sums among nested values."""
    return (leaf for leaf in leaves_of(tree) if isinstance(leaf, Sum))


def is_float(leaf: Any) -> bool:
    """Whether a value is a tensor of floating-point numbers."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def is_condition(leaf: Any) -> bool:
    """Whether a tensor depends on data, and is unknown or chooses by truth values."""
    return isinstance(leaf, Unknown) or (isinstance(leaf, Chosen) and leaf.dtype == torch.bool)


def is_complex(leaf: Any) -> bool:
    """Whether a value is a tensor of complex numbers."""
    return isinstance(leaf, Tensor) and leaf.is_complex()


def carries_paths(leaf: Any) -> bool:
    """Whether paths pass an operand or start in it."""
    return isinstance(leaf, Sum) or is_float(leaf)


def is_number(leaf: Any) -> bool:
    """Whether a value is a number, and not a truth value."""
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def wide(leaf: Any) -> Any:
    """A tensor of real numbers, or a type of them, in double precision."""
    if isinstance(leaf, torch.dtype):
        return torch.float64 if leaf.is_floating_point else leaf
    return leaf.double() if is_float(leaf) else leaf


def absolute_power(value: Tensor, p: float) -> Tensor:
    """``|value|^p`` in double precision, and 0 for infinite entries (masks)."""
    # (in place: fresh memory takes longer than the computation)
    size = value.to(torch.float64, copy=True).abs_()
    if p > 2 or (p > 1 and value.dtype == torch.float64):
        used = size.detach()[(size > 0) & torch.isfinite(size)]
        least, most = (float(used.min()), float(used.max())) if used.numel() else (1.0, 1.0)
        reach = max(abs(math.log(least)), abs(math.log(most)))
        if p * reach > RANGE:
            raise InputError(
                f"path_norm found p={p:g}, at which powers of numbers from {least:.3g} to"
                f" {most:.3g} leave the floats, expected at most p={RANGE / reach:.3g} here."
            )
    size = size if p == 1 else size.square_() if p == 2 else size.pow_(p)
    return size.nan_to_num_(nan=math.nan, posinf=0.0)


def as_sum(leaf: Any, p: float) -> Sum:
    """A tensor or a number of the model as sums over the paths that start in it."""
    if isinstance(leaf, Sum):
        return leaf
    if isinstance(leaf, Chosen):
        return Sum.start(leaf.shape)
    return Sum(absolute_power(torch.as_tensor(leaf), p))


def common_log(sums: Sequence[Sum]) -> float:
    """The largest logarithm among sums that are not zero."""
    return max((one.log for one in sums if one.log == 0.0 or bool(one.values.any())), default=0.0)


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


def multiplied(
    run: Operation, facts: Facts, args: Sequence[Any], kwargs: Mapping[str, Any], p: float
) -> Sum:
    """An operation that is linear in each of its operands: products of paths, one through each."""
    operands, place = list(args), len(args) if facts.bias is None else facts.bias
    bias = None
    if place < len(operands) and operands[place] is not None:
        bias, operands[place] = as_sum(operands[place], p), None
    x, weight = (*operands, None)[:2]
    matrix = facts.bias == 2 and is_float(weight) and weight.dim() == 2
    if matrix and isinstance(x, Sum) and weight.numel() > MANY:
        found = [run(x.values, absolute_power(rows, p)) for rows in weight.split(ROWS)]
        product = Sum.of(torch.cat(found, -1), x.log)
        return product if bias is None else added(product, bias)
    log = sum(one.log for one in each_sum(operands))
    flat, spec = pytree.tree_flatten(operands, is_leaf=lambda leaf: isinstance(leaf, Sum))
    for i, leaf in enumerate(flat):
        if isinstance(leaf, Sum | Tensor):
            flat[i] = as_sum(leaf, p).values
        elif is_number(leaf) and facts.kind == "product":
            flat[i] = abs(leaf) ** p
    if bias is not None:
        first = next(i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor))
        top = common_log([Sum(flat[first], log), bias])
        flat[first] = Sum(flat[first], log).at(top)
        log = top
    operands = pytree.tree_unflatten(flat, spec)
    if bias is not None:
        operands[place] = bias.at(log)
    # (numbers among the keywords are factors)
    named = {key: abs(v) ** p if is_number(v) else v for key, v in kwargs.items()}
    return Sum.of(run(*operands, **named), log)


def moved_sums(run: Operation, args: Any, kwargs: Any, p: float, fills: bool) -> Any:
    """An operation that moves or adds elements and, if it ``fills``, writes constants."""
    log = common_log([as_sum(leaf, p) for leaf in leaves_of((args, kwargs)) if carries_paths(leaf)])

    def times(factor: float) -> Any:
        own, named = map_sums(
            lambda leaf: (
                factor * as_sum(leaf, p).at(log).contiguous() if carries_paths(leaf) else leaf
            ),
            (args, kwargs),
        )
        return run(*own, **named)

    if not fills:
        return pytree.tree_map(lambda leaf: Sum.of(leaf, log), times(1.0))
    constant = times(0.0)
    return added(Sum(_finite(times(1.0) - constant), log), Sum(_finite(constant).abs() ** p))


def _finite(leaf: Any) -> Any:
    return leaf.nan_to_num(nan=math.nan, posinf=0.0, neginf=0.0) if is_float(leaf) else leaf


class AffineMap:
    """An operation that is affine in all sums among its operands, with measured coefficients."""

    def __init__(self, run: Operation, args: Any, kwargs: Any, p: float, elementwise: bool) -> None:
        self.run, self.p, self.elementwise = run, p, elementwise
        self.flat, self.spec = pytree.tree_flatten(
            map_sums(wide, (args, kwargs)), is_leaf=lambda leaf: isinstance(leaf, Sum)
        )
        self.places = {i: leaf for i, leaf in enumerate(self.flat) if isinstance(leaf, Sum)}

    def at(self, values: Mapping[int, Tensor]) -> Any:
        """The result for these operands, by the number of their place, and for 0 in all others."""
        small = any(not value.dim() for value in values.values())

        def operand(i: int, leaf: Any) -> Any:
            if not isinstance(leaf, Sum):
                return leaf
            zero = torch.zeros(() if small else leaf.values.shape, dtype=torch.float64)
            return values.get(i, zero)

        flat = [operand(i, leaf) for i, leaf in enumerate(self.flat)]
        own, named = pytree.tree_unflatten(flat, self.spec)
        # (random operations leave the global random state as it was)
        with torch_kept():
            return pytree.tree_map(_finite, self.run(*own, **named))

    def drawn(self, seed: int) -> dict[int, Tensor]:
        """Random operands."""
        source = torch.Generator().manual_seed(seed)
        return {
            i: torch.randn(one.values.shape, dtype=torch.float64, generator=source)
            for i, one in self.places.items()
        }

    def constant(self) -> Tensor | None:
        """The result for 0 if the function is affine at random operands, or ``None``."""
        start = self.at({})
        if not isinstance(start, Tensor) or start.dtype != torch.float64:
            return None
        one, two = self.drawn(0), self.drawn(1)
        # (of a function that is not affine, the sum of both and the opposite tell)
        both = {i: one[i] + two[i] for i in one}
        opposite = {i: -value for i, value in one.items()}
        a, b, c, d = (self.at(each) - start for each in (one, two, both, opposite))
        sizes = [float(each.abs().max()) if each.numel() else 0.0
                 for each in (start, a, b, c, a + b - c, a + d)]  # fmt: skip
        return start if max(sizes[4:]) <= AGREEMENT * max(sizes[:4]) else None

    def moves(self, start: Tensor) -> bool:
        """Whether every result is a constant or an element of an operand."""
        drawn = self.drawn(0)
        known = torch.cat([torch.zeros(1), *(value.reshape(-1) for value in drawn.values())])
        return bool(torch.isin(self.at(drawn) - start, known).all())

    def sums(self) -> Sum:
        """``sum_i |A_oi|^p x_i`` of the linear part ``A``, and the constants."""
        small = dict.fromkeys(self.places, torch.zeros((), dtype=torch.float64))
        start = self.at(small if self.elementwise else {})
        count = sum(one.values.numel() for one in self.places.values())
        if not self.elementwise and count > UNIT_VECTORS:
            raise UnsupportedError(
                f"path_norm found a linear map of {count:,} elements whose coefficients are not"
                f" known, expected at most {UNIT_VECTORS:,}; use smaller example inputs."
            )
        parts = [Sum(start.abs() ** self.p)]
        for place, one in self.places.items():
            columns = [(torch.ones((), dtype=torch.float64), one.values)]
            if not self.elementwise:
                units = torch.eye(one.values.numel(), dtype=torch.float64)
                shaped = units.reshape(-1, *one.values.shape)
                columns = list(zip(shaped, one.values.reshape(-1), strict=True))
            total = sum(self._factor(place, unit, start) ** self.p * size for unit, size in columns)
            parts.append(Sum.of(torch.as_tensor(total), one.log))
        result = added(*parts)
        shapes = (part.values.shape for part in parts)
        return Sum(result.values.expand(torch.broadcast_shapes(*shapes)), result.log)

    def _factor(self, place: int, unit: Tensor, start: Tensor) -> Tensor:
        found: Tensor = (self.at({place: unit * WIDE}) - start) / WIDE
        return found.abs()


def separated(run: Operation, x: Sum, p: float, rank: int) -> Sum:
    """An operation on images that is a product of one map per dimension, one after the other.

    Let ``r_d[o] = sum_i A_d[o, i]``. Unit vectors along one dimension and ones along all others
    give ``B_d[o, i] = A_d[o, i] prod_(d' != d) r_d'[c]`` at a central position ``c``. The product
    of all ``B_d`` therefore has the factor ``prod_d r_d[c]`` too often: once for every dimension
    but one. The sizes of the other dimensions do not change a map, so small sizes are used.
    """
    sizes = x.values.shape[-rank:]
    try:
        matrices, norm = _maps(run, sizes, [min(n, NARROW) for n in sizes])
    except RuntimeError:
        # (a window is larger than these sizes)
        matrices, norm = _maps(run, sizes, list(sizes))
    values = x.values
    for d, matrix in enumerate(matrices):
        turned = torch.movedim(values, d - rank, -1) @ (matrix / norm).abs() ** p
        values = torch.movedim(turned, -1, d - rank)
    return Sum.of(values, x.log)


def _maps(run: Operation, sizes: Sequence[int], small: list[int]) -> tuple[list[Tensor], float]:
    """The maps (in, out) along each dimension, and the common factor by which each is too large."""
    rank = len(sizes)
    whole = run(torch.ones((1, 1, *small), dtype=torch.float64))
    middle = [n // 2 for n in whole.shape[2:]]
    matrices = []
    for d, size in enumerate(sizes):
        line = torch.eye(size, dtype=torch.float64)
        units = line.reshape(size, 1, *(size if e == d else 1 for e in range(rank)))
        lengths = (size if e == d else n for e, n in enumerate(small))
        place = [slice(None) if e == d else middle[e] for e in range(rank)]
        found = run(units.expand(size, 1, *lengths).contiguous())
        matrices.append(found[(slice(None), 0, *place)])
    return matrices, float(whole[(0, 0, *middle)]) ** ((rank - 1) / rank)
