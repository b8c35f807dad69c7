"""Affine maps with unknown coefficients: measured on the operation itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import UnsupportedError
from ..models.isolation import torch_kept
from .path_sums import (
    Operation,
    Sum,
    common_log,
    double_dtype,
    is_float_tensor,
    map_sums,
    sum_leaves,
    wide,
)

# a linear map with unknown coefficients is applied to at most this many unit vectors
UNIT_VECTORS = 4096
# random operands of an affine function agree up to this part of the largest number
AGREEMENT = 1e-9


class AffineMap:
    """An operation as a function of the sums among its operands, every place for itself.

    Args:
        run: the operation.
        args: its operands: sums, tensors of the model, numbers.
        kwargs: its keyword operands.
        complexes: numbers of the places that hold complex numbers.
    """

    def __init__(
        self, run: Operation, args: Any, kwargs: Any, complexes: frozenset[int] = frozenset()
    ) -> None:
        self.run, self.complexes = run, complexes
        tree = map_sums(wide, (args, double_dtype(kwargs)))
        self.flat, self.spec = (
            sum_leaves(tree),
            pytree.tree_structure(tree, is_leaf=lambda leaf: isinstance(leaf, Sum)),
        )
        self.places = {i: leaf for i, leaf in enumerate(self.flat) if isinstance(leaf, Sum)}

    def at(self, values: Mapping[int, Tensor], absolute: bool = False) -> Any:
        """The result for these operands, and for 0 in all other places.

        Args:
            values: number of a place -> operand.
            absolute: whether tensors of the model count with their absolute values.
        """

        def operand(i: int, leaf: Any) -> Any:
            if not isinstance(leaf, Sum):
                return leaf.abs() if absolute and is_float_tensor(leaf) else leaf
            found = values.get(i, torch.zeros(leaf.values.shape, dtype=torch.float64))
            return found.to(torch.complex128) if i in self.complexes else found

        own, named = pytree.tree_unflatten(
            [operand(i, leaf) for i, leaf in enumerate(self.flat)], self.spec
        )
        # (random operations leave the global random state as it was)
        with torch_kept():
            return pytree.tree_map(_finite, self.run(*own, **named))

    def drawn(self, seed: int) -> dict[int, Tensor]:
        """Random operands."""
        source = torch.Generator().manual_seed(seed)
        return {
            i: torch.randn(
                one.values.shape,
                dtype=torch.complex128 if i in self.complexes else torch.float64,
                generator=source,
            )
            for i, one in self.places.items()
        }

    def constant(self) -> Tensor | None:
        """The result for 0 if the function is affine in all operands together, up to rounding at
        random operands; ``None`` if it is not, or has several results.
        """
        start = self.at({})
        if not isinstance(start, Tensor) or start.dtype not in (torch.float64, torch.complex128):
            return None
        one, two = self.drawn(0), self.drawn(1)
        # (of a function that is not affine, the sum of both and the opposite tell)
        both = {i: one[i] + two[i] for i in one}
        opposite = {i: -value for i, value in one.items()}
        a, b, c, d = (self.at(each) - start for each in (one, two, both, opposite))
        size = max(float(each.abs().max()) for each in (start, a, b, c)) if start.numel() else 0.0
        off = [float(each.abs().max()) for each in (a + b - c, a + d)] if start.numel() else [0.0]
        return start if max(off) <= AGREEMENT * size else None

    def is_constant(self, start: Tensor) -> bool:
        """Whether the operands do not matter."""
        return bool((self.at(self.drawn(0)) == start).all())

    def by_unit_vectors(self, start: Tensor, p: float) -> Sum:
        """``sum_i |A_oi|^p x_i`` of the linear part ``A``, one column at a time.

        A map ``a z + b conj(z)`` of a complex number has the coefficient ``|a| + |b|``, its
        largest factor.

        Raises:
            UnsupportedError: ``A`` has more than 4096 columns.
        """
        count = sum(one.values.numel() for one in self.places.values())
        if count > UNIT_VECTORS:
            raise UnsupportedError(
                f"path_norm found a linear map of {count:,} elements whose coefficients are not"
                f" known, expected at most {UNIT_VECTORS:,}; use smaller example inputs."
            )
        log = common_log(list(self.places.values()))
        total = torch.zeros(start.shape, dtype=torch.float64)
        for place, one in self.places.items():
            for i, size in enumerate(one.at(log).reshape(-1).unbind()):
                if bool(size):
                    unit = torch.zeros(one.values.numel(), dtype=torch.float64)
                    unit[i] = 1.0
                    factor = self._factor(place, unit.reshape(one.values.shape), start)
                    total = total + factor**p * size
        return Sum.of(total, log)

    def by_element(self, start: Tensor, p: float) -> Sum:
        """The same for an elementwise operation, whose coefficients are found all at once."""
        log = common_log(list(self.places.values()))
        total = torch.zeros(start.shape, dtype=torch.float64)
        for place, one in self.places.items():
            factor = self._factor(place, torch.ones_like(one.values), start)
            total = total + factor**p * one.at(log)
        return Sum.of(total, log)

    def _factor(self, place: int, unit: Tensor, start: Tensor) -> Tensor:
        """Absolute values of coefficients."""
        real: Tensor = self.at({place: unit}) - start
        if place not in self.complexes:
            return real.abs()
        turned = (self.at({place: unit * 1j}) - start) * 1j
        both: Tensor = ((real - turned).abs() + (real + turned).abs()) / 2
        return both


def agree(one: Tensor, two: Tensor) -> bool:
    """Whether two results are equal up to rounding."""
    size = max(float(one.abs().max()), float(two.abs().max())) if one.numel() else 0.0
    return one.shape == two.shape and (
        not one.numel() or float((one - two).abs().max()) <= AGREEMENT * size
    )


def _finite(leaf: Any) -> Any:
    """Infinite entries as 0: no path passes a mask."""
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return torch.nan_to_num(leaf.resolve_conj().resolve_neg(), nan=math.nan, posinf=0.0, neginf=0.0)
