"""Sums over the paths that reach every element, and how linear operations pass them on.

With ``s`` the sum of ``|v|^p`` over the paths to an element: a linear map with coefficients ``a``
gives ``sum |a|^p s``, and a product of operands the product of their sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..capture.captured import named_arguments
from ..errors import InputError, UnsupportedError
from ..inference.registry import facts_of, operation_name
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


class OperationCall:
    """An operation with its operands: sums (``entering``), tensors of the model, numbers.

    ``leaves`` are all operands, ``shown`` is the result in the captured graph, and ``run`` the
    operation, or its out-of-place form if it writes into an operand.
    """

    def __init__(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.node, self.args, self.kwargs = node, args, kwargs
        self.name, self.facts = operation_name(node.target), facts_of(node)
        self.shown: Any = node.meta.get("val")
        self.leaves = pytree.tree_leaves((args, kwargs))
        self.entering = [leaf for leaf in self.leaves if isinstance(leaf, Sum)]
        self.run: Any = node.target
        schema = getattr(self.run, "_schema", None)
        if schema is not None and schema.is_mutable:
            plain = self.name.removeprefix("aten.").rstrip("_")
            self.run = getattr(torch.ops.aten, plain, self.run)

    @cached_property
    def given(self) -> dict[str, Any]:
        """Its operands by name."""
        return named_arguments(self.node.target, self.args, self.kwargs)

    def has(self, kind: type) -> bool:
        """Whether some operand is of a class."""
        return any(isinstance(leaf, kind) for leaf in self.leaves)

    def mapped(self, function: Any) -> OperationCall:
        """The same with other operands."""
        return OperationCall(self.node, *pytree.tree_map(function, (self.args, self.kwargs)))

    def kept(self, value: Sum) -> Any:
        """A sum as the first result, and unknown numbers for any further results."""
        if isinstance(self.shown, Tensor):
            return value
        more = [torch.zeros(tuple(other.shape), dtype=other.dtype) for other in self.shown[1:]]
        return (value, *(other.as_subclass(Unknown) for other in more))


def is_float(leaf: Any) -> bool:
    """Whether a value is a tensor of floating-point numbers."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def is_condition(leaf: Any) -> bool:
    """Whether a tensor depends on data, and is unknown or chooses by truth values."""
    return isinstance(leaf, Unknown) or (isinstance(leaf, Chosen) and leaf.dtype == torch.bool)


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


def multiplied(call: OperationCall, p: float) -> Sum:
    """An operation that is linear in each of its operands: products of paths, one through each."""
    facts, run = call.facts, call.run
    operands: list[Any] = [*call.args, None, None]
    x, weight, *rest = operands
    matrix = facts.bias == 2 and is_float(weight) and weight.dim() == 2
    if matrix and isinstance(x, Sum) and weight.numel() > MANY:
        found = [run(x.values, absolute_power(rows, p)) for rows in weight.split(ROWS)]
        product = Sum.of(torch.cat(found, -1), x.log)
        return product if rest[0] is None else added(product, as_sum(rest[0], p))
    flat, spec = pytree.tree_flatten(list(call.args))
    entering = {i: as_sum(leaf, p) for i, leaf in enumerate(flat) if isinstance(leaf, Sum | Tensor)}
    place = -1 if facts.bias is None else facts.bias
    bias = entering.pop(place, None)
    log = top = sum(one.log for one in entering.values())
    if bias is not None:
        first = next(iter(entering))
        product = Sum(entering[first].values, log)
        top = common_log([product, bias])
        entering |= {first: Sum(product.at(top)), place: Sum(bias.at(top))}
    for i, leaf in enumerate(flat):
        if i in entering:
            flat[i] = entering[i].values
        elif is_number(leaf) and facts.kind == "product":
            flat[i] = abs(leaf) ** p
    # (numbers among the keywords are factors)
    named = {key: abs(v) ** p if is_number(v) else v for key, v in call.kwargs.items()}
    return Sum.of(run(*pytree.tree_unflatten(flat, spec), **named), top)


def moved_sums(call: OperationCall, p: float, fills: bool) -> Any:
    """An operation that moves or adds elements and, if it ``fills``, writes constants."""
    flat, spec = pytree.tree_flatten((call.args, call.kwargs))
    carrying = {
        i: as_sum(leaf, p) for i, leaf in enumerate(flat) if isinstance(leaf, Sum) or is_float(leaf)
    }
    log = common_log(list(carrying.values()))

    def times(factor: float) -> Any:
        values = {i: factor * one.at(log).contiguous() for i, one in carrying.items()}
        own, named = pytree.tree_unflatten([values.get(i, v) for i, v in enumerate(flat)], spec)
        return call.run(*own, **named)

    if not fills:
        return pytree.tree_map(lambda leaf: Sum.of(leaf, log), times(1.0))
    constant = times(0.0)
    return added(Sum(_finite(times(1.0) - constant), log), Sum(_finite(constant).abs() ** p))


def _finite(leaf: Any) -> Any:
    return leaf.nan_to_num(nan=math.nan, posinf=0.0, neginf=0.0) if is_float(leaf) else leaf


class AffineMap:
    """An operation that is affine in all sums among its operands, with measured coefficients."""

    def __init__(self, call: OperationCall, p: float) -> None:
        self.run, self.p, self.elementwise = call.run, p, call.facts.elementwise
        self.flat, self.spec = pytree.tree_flatten(pytree.tree_map(wide, (call.args, call.kwargs)))
        self.entering = [leaf for leaf in self.flat if isinstance(leaf, Sum)]

    def at(self, values: Iterable[Tensor]) -> Any:
        """The result for these operands in place of the sums."""
        each = iter(values)
        flat = [next(each) if isinstance(leaf, Sum) else leaf for leaf in self.flat]
        own, named = pytree.tree_unflatten(flat, self.spec)
        # (random operations leave the global random state as it was)
        with torch_kept():
            return pytree.tree_map(_finite, self.run(*own, **named))

    def moves(self) -> bool | None:
        """Whether every result is a constant or an element of an operand; ``None`` if the function
        is not affine at random operands.
        """
        source, shapes = torch.Generator().manual_seed(0), [s.values.shape for s in self.entering]
        one, two = (
            [torch.randn(shape, dtype=torch.float64, generator=source) for shape in shapes]
            for _ in range(2)
        )
        start = self.at(torch.zeros_like(value) for value in one)
        if not isinstance(start, Tensor) or start.dtype != torch.float64:
            return None
        # (of a function that is not affine, the sum of both and the opposite tell)
        both = [a + b for a, b in zip(one, two, strict=True)]
        opposite = [-value for value in one]
        a, b, c, d = (self.at(each) - start for each in (one, two, both, opposite))
        sizes = [float(each.abs().max()) if each.numel() else 0.0
                 for each in (start, a, b, c, a + b - c, a + d)]  # fmt: skip
        known = torch.cat([torch.zeros(1), *(value.reshape(-1) for value in one)])
        affine = max(sizes[4:]) <= AGREEMENT * max(sizes[:4])
        return bool(torch.isin(a, known).all()) if affine else None

    def sums(self) -> Sum:
        """``sum_i |A_oi|^p x_i`` of the linear part ``A``, and the constants."""
        count = sum(one.values.numel() for one in self.entering)
        if not self.elementwise and count > UNIT_VECTORS:
            raise UnsupportedError(
                f"path_norm found a linear map of {count:,} elements whose coefficients are not"
                f" known, expected at most {UNIT_VECTORS:,}; use smaller example inputs."
            )
        # (one element tells of all, if these are alike)
        shapes = [() if self.elementwise else one.values.shape for one in self.entering]
        zeros = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        start = self.at(zeros)
        parts = [Sum(start.abs() ** self.p)]
        for place, one in enumerate(self.entering):
            units = torch.eye(zeros[place].numel(), dtype=torch.float64) * WIDE
            sizes = [one.values] if self.elementwise else one.values.reshape(-1)
            total = torch.zeros((), dtype=torch.float64)
            for unit, size in zip(units, sizes, strict=True):
                column = self.at([*zeros[:place], unit.reshape(shapes[place]), *zeros[place + 1 :]])
                total = total + ((column - start) / WIDE).abs() ** self.p * size
            parts.append(Sum.of(total, one.log))
        return added(*parts)


def separated(run: Operation, x: Sum, p: float, rank: int) -> Sum:
    """An operation on images that is a product of one map per dimension, one after the other.

    Let ``r_d[o] = sum_i A_d[o, i]``. Unit vectors along one dimension and ones along all others
    give ``B_d[o, i] = A_d[o, i] prod_(d' != d) r_d'[c]`` at a central position ``c``. The product
    of all ``B_d`` therefore has the factor ``prod_d r_d[c]`` too often: once for every dimension
    but one. The sizes of the other dimensions do not change a map, so small sizes are used.
    """
    values, sizes = x.values, list(x.values.shape[-rank:])
    try:
        matrices = _maps(run, sizes, [min(n, NARROW) for n in sizes])
    except RuntimeError:
        # (a window is larger than these sizes)
        matrices = _maps(run, sizes, sizes)
    for d, matrix in enumerate(matrices):
        values = (values.movedim(d - rank, -1) @ matrix.abs() ** p).movedim(-1, d - rank)
    return Sum.of(values, x.log)


def _maps(run: Operation, sizes: list[int], small: list[int]) -> list[Tensor]:
    """The maps (in, out) along each dimension."""
    rank, matrices = len(sizes), []
    whole = run(torch.ones((1, 1, *small), dtype=torch.float64))
    middle = [n // 2 for n in whole.shape[2:]]
    # the common factor by which each would be too large
    norm = float(whole[(0, 0, *middle)]) ** ((rank - 1) / rank)
    for d, size in enumerate(sizes):
        line = torch.eye(size, dtype=torch.float64)
        units = line.reshape(size, 1, *(size if e == d else 1 for e in range(rank)))
        lengths = (size if e == d else n for e, n in enumerate(small))
        place = [slice(None) if e == d else middle[e] for e in range(rank)]
        found = run(units.expand(size, 1, *lengths).contiguous())
        matrices.append(found[(slice(None), 0, *place)] / norm)
    return matrices
