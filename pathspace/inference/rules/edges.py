"""Helpers of rules: edges of masked parameters, products with constants,
and what may be an ``eps``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...capture.captured import named_arguments
from ..handwritten_norms import guards_a_division
from ..semantics import Semantics, is_free
from ..values import (
    NEUTRAL,
    ROOT,
    Value,
    Weight,
    broadcast_shape,
    compress,
    constant,
    constants_like,
    distinct,
    distinct_together,
    value_of,
    with_value,
)

# products with more relations between scales than this are pinned
LARGEST = 2_000_000
# constants up to this size that are added to a divisor count as the eps of a normalisation
EPS = 1e-4


def arguments_of(semantics: Semantics, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of the operation by their names, with defaults."""
    target = getattr(semantics.place.node, "target", None)
    return named_arguments(target, args, kwargs)


def edges(semantics: Semantics, weight: Weight, value: Value, dims: Sequence[int]) -> Tensor:
    """``sum over dims of weight * value``, in which masked scalars count as exact zeros."""
    if weight.kept is None:
        return semantics.contract(weight, value, dims)
    ids, kept = semantics.activation(value), weight.kept
    masked = torch.where(distinct(kept), distinct(ids), NEUTRAL).expand(
        broadcast_shape(kept.shape, ids.shape)
    )
    return semantics.contract(weight.unmasked(), masked, dims)


def has_fixed_scale(value: Any) -> bool:
    """Whether a tensor has a fixed scale everywhere."""
    return isinstance(value, Tensor) and bool((distinct(value) == ROOT).all())


def is_constant(value: Any) -> TypeGuard[Tensor]:
    """Whether all elements that are not exactly zero have a fixed scale."""
    return isinstance(value, Tensor) and not is_free(value)


def as_factor(value: Any) -> Any:
    """A factor or summand, in which false is zero (a condition that only selects has no zeros)."""
    known = value_of(value)
    return value if known is None or known.dtype != torch.bool else with_value(known.byte())


def times(semantics: Semantics, x: Tensor, y: Tensor, power: int = 1) -> Tensor:
    """``x * y ** power`` elementwise; constants do not change scales, zeros remain."""
    shape = broadcast_shape(x.shape, y.shape)
    if is_constant(y):
        x = semantics.scaled(x, y)
        return (
            x.expand(shape)
            if has_fixed_scale(y)
            else compress(torch.where(y == NEUTRAL, NEUTRAL, x).expand(shape))
        )
    if is_constant(x) and power == 1:
        return times(semantics, y, x)
    return power_product(semantics, (1, x), (power, y))


def power_product(semantics: Semantics, *factors: tuple[int, Tensor]) -> Tensor:
    """A product of powers, pinned if it has too many relations."""
    shape = broadcast_shape(*(entry.shape for _, entry in factors))
    if distinct_together(*(entry for _, entry in factors))[0].numel() > LARGEST:
        semantics.pin(
            [entry for _, entry in factors], "a product of more scales than can be followed"
        )
        return constant(shape)
    return semantics.product(*factors)


def with_others(semantics: Semantics, first: Value) -> Any:
    """The first result of an operation, and constants for its further results, if there are any."""
    shown = semantics.place.result
    return (first, *constants_like(shown[1:])) if isinstance(shown, list | tuple) else first


def with_positions(semantics: Semantics, values: Tensor, compared: Tensor) -> Any:
    """Values, and positions that depend on ``compared``, which counts as used."""
    if not isinstance(semantics.place.result, list | tuple):
        return values
    node = semantics.place.node
    used = node is None or any(user.args[1] == 1 and user.users for user in node.users)
    return values, semantics.observe(compared) if used else constant(compared.shape)


def negligible(semantics: Semantics, value: Any, operand: Any, exact: bool = False) -> bool:
    """Whether a number is an ``eps`` written out by hand and can be ignored; records it."""
    node = semantics.place.node
    small = isinstance(value, float) and 0 < abs(value) <= EPS
    free = isinstance(operand, Weight) or is_free(operand)
    if (
        not (small and free)
        or semantics.exact_norms
        or node is None
        or not guards_a_division(node, semantics.sources)
    ):
        return False
    semantics.negligible.append(node.name)
    semantics.folded_eps.append((semantics.place.source, float(value)))
    if not exact:
        semantics.approximate.append(semantics.activation(operand))
    return True
