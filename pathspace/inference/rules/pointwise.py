"""Elementwise operations of several operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pathspace.inference.registry import rule
from pathspace.inference.semantics import Semantics
from pathspace.inference.values import NEUTRAL, ROOT, Value, Weight, distinct


@rule(
    "aten.add",
    "aten.add_",
    "aten.sub",
    "aten.sub_",
    "aten.rsub",
    "aten.maximum",
    "aten.minimum",
    "aten.lerp",
    "aten.fmax",
    "aten.fmin",
)
def add(semantics: Semantics, x: Value, y: Any, *args: Any, **kwargs: Any) -> Tensor:
    """``c x + c y = c (x + y)``: sums, differences, maxima and minima need one scale."""
    return semantics.join(semantics.activation(x), semantics.activation(y))


@rule("aten.where")
def where(semantics: Semantics, condition: Value, x: Any, y: Any) -> Tensor:
    """A choice between operands, by a condition whose own scale is fixed."""
    semantics.pin([condition], "a condition compares values")
    shape = torch.broadcast_shapes(condition.shape, *(getattr(v, "shape", ()) for v in (x, y)))
    return semantics.join(semantics.activation(x), semantics.activation(y)).expand(shape)


@rule("aten.masked_fill", "aten.masked_fill_")
def masked_fill(semantics: Semantics, x: Value, mask: Value, value: Any) -> Tensor:
    """Filling with zero or infinity keeps scales free."""
    return where(semantics, mask, value, x)


def _fixed(ids: Tensor) -> bool:
    return bool((distinct(ids) == ROOT).all())


@rule("aten.mul", "aten.mul_", "aten.multiply")
def mul(semantics: Semantics, x: Any, y: Any) -> Value:
    """A product by a constant keeps the scale; by a parameter it is an edge; of two free activations it is pinned."""
    if not isinstance(y, Tensor | Weight):
        return semantics.activation(x)
    if not isinstance(x, Tensor | Weight):
        return semantics.activation(y)
    if isinstance(x, Weight) and isinstance(y, Weight):
        x = semantics.attach(x)
    if isinstance(x, Weight) or isinstance(y, Weight):
        weight, value = (x, y) if isinstance(x, Weight) else (y, x)
        assert isinstance(weight, Weight) and isinstance(value, Tensor)
        return semantics.contract(weight, value, ())
    assert isinstance(x, Tensor) and isinstance(y, Tensor)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    for constant, other in ((x, y), (y, x)):
        if _fixed(constant):
            return other.expand(shape)
    neutral = (x == NEUTRAL) | (y == NEUTRAL)
    semantics.pin([x, y], "a product of two activations with free scales")
    return torch.where(neutral, NEUTRAL, ROOT)


@rule("aten.div", "aten.div_", "aten.divide", "aten.true_divide")
def div(semantics: Semantics, x: Any, y: Any, **kwargs: Any) -> Value:
    """A quotient by a constant keeps the scale (unless it is rounded)."""
    ids = semantics.activation(x)
    if kwargs.get("rounding_mode") is not None:
        semantics.pin([ids], "rounding is not homogeneous")
        return torch.full(torch.broadcast_shapes(ids.shape, getattr(y, "shape", ())), ROOT)
    if not isinstance(y, Tensor | Weight):
        return ids
    below = semantics.activation(y)
    shape = torch.broadcast_shapes(ids.shape, below.shape)
    if not _fixed(below):
        semantics.pin([ids, below], "a quotient by an activation with a free scale")
        return torch.tensor(ROOT).expand(shape)
    return ids.expand(shape)


@rule("aten.prelu", "aten._prelu_kernel")
def prelu(semantics: Semantics, x: Value, slope: Value) -> Tensor:
    """``max(x, 0) + a min(x, 0)``: the slope is an edge from a unit to itself."""
    ids = semantics.activation(x)
    if not isinstance(slope, Weight):
        return ids
    wanted = (1, -1) + (1,) * (ids.dim() - 2) if len(slope.shape) == 1 and ids.dim() > 1 else tuple(slope.shape)
    return semantics.loop(slope.moved(lambda t: t.reshape(wanted), semantics.offsets), ids)
