"""Conversions to other types, as operations of their own or inside of others,
such as sums of integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .registry import facts_of
from .semantics import Semantics
from .values import NEUTRAL, ROOT, Value, Weight, distinct

# kinds of operations whose results can be integers although they convert no operand
# (nothing is known of others)
UNCONVERTED = frozenset(["", "comparison", "creation", "movement", "random", "rounding", "size"])

# operations that read only the shape of an operand
SHAPES = frozenset(["aten.expand_as", "aten.reshape_as", "aten.view_as"])


def converted(semantics: Semantics, value: Value, dtype: torch.dtype) -> Value:
    """A value as another type: floating-point types of two bytes and more keep scales,
    booleans need none, others fix them.
    """
    if _keeps_scales(dtype):
        return value
    if dtype == torch.bool:
        return semantics.observe(semantics.activation(value))
    why = "to 8 bits " * dtype.is_floating_point
    return semantics.opaque([semantics.activation(value)], f"rounding {why}is not homogeneous")


def _keeps_scales(dtype: torch.dtype) -> bool:
    """Whether rounding to a type is small beside the numbers (those of one byte have four bits of
    precision at most, and end at 448 or 57,344).
    """
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def as_stored(semantics: Semantics, args: Any, kwargs: Any) -> Any:
    """The operands of an operation in the type of its result, if that is a type of
    integers, truth values or numbers of 8 bits.
    """
    shown = semantics.place.result
    if not isinstance(shown, Tensor) or _keeps_scales(shown.dtype):
        return args, kwargs
    if semantics.place.op in SHAPES or facts_of(semantics.place.op).kind in UNCONVERTED:
        return args, kwargs

    def one(value: Any) -> Any:
        return (
            converted(semantics, value, shown.dtype)
            if isinstance(value, Weight) or is_free(value)
            else value
        )

    return pytree.tree_map(one, (args, kwargs))


def is_free(value: Any) -> bool:
    """Whether an activation has a free scale."""
    if not isinstance(value, Tensor):
        return False
    ids = distinct(value)
    return bool(((ids != ROOT) & (ids != NEUTRAL)).any())
