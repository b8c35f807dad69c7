"""Elementwise operations of several operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pathspace.inference.registry import rule
from pathspace.inference.semantics import Semantics
from pathspace.inference.values import ROOT, Value, Weight, constant, distinct


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
    semantics.pin([semantics.activation(condition)], "a condition compares values")
    known = getattr(condition, "known", None)
    if known is not None:
        return torch.where(known, semantics.activation(x), semantics.activation(y))
    shape = torch.broadcast_shapes(condition.shape, *(getattr(v, "shape", ()) for v in (x, y)))
    return semantics.join(semantics.activation(x), semantics.activation(y)).expand(shape)


@rule("aten.masked_fill", "aten.masked_fill_")
def masked_fill(semantics: Semantics, x: Value, mask: Value, value: Any) -> Tensor:
    """Filling with zero or infinity keeps scales free."""
    return where(semantics, mask, value, x)


@rule("aten.mul", "aten.mul_", "aten.multiply")
def mul(semantics: Semantics, x: Any, y: Any) -> Value:
    """A product by a number keeps the scale, by a parameter it is an edge; scales of two activations add up."""
    if not isinstance(y, Tensor | Weight):
        return x
    if not isinstance(x, Tensor | Weight):
        return y
    if isinstance(x, Weight) and isinstance(y, Weight):
        x = semantics.attach(x)
    if isinstance(x, Weight) or isinstance(y, Weight):
        weight, value = (x, y) if isinstance(x, Weight) else (y, x)
        if plain(value) and weight.shape == torch.broadcast_shapes(weight.shape, value.shape):
            # a parameter times constants is still that parameter to a rescaling
            return weight
        return semantics.contract(weight, value, ())
    return semantics.product((1, x), (1, y))


def plain(value: Any) -> bool:
    """Whether a tensor has a fixed scale everywhere."""
    return isinstance(value, Tensor) and bool((distinct(value) == ROOT).all())


@rule("aten.div", "aten.div_", "aten.divide", "aten.true_divide")
def div(semantics: Semantics, x: Any, y: Any, **kwargs: Any) -> Value:
    """A quotient by a number keeps the scale (unless it is rounded); scales of two activations are subtracted."""
    if kwargs.get("rounding_mode") is not None:
        semantics.pin([semantics.activation(v) for v in (x, y)], "rounding is not homogeneous")
        return constant(torch.broadcast_shapes(*(getattr(v, "shape", ()) for v in (x, y))))
    if not isinstance(y, Tensor | Weight):
        return x
    if plain(y) and isinstance(x, Weight) and x.shape == torch.broadcast_shapes(x.shape, y.shape):
        return x
    return semantics.product((1, semantics.activation(x)), (-1, semantics.activation(y)))


@rule(
    "aten.square",
    "aten.square_",
    "aten.reciprocal",
    "aten.reciprocal_",
    "aten.sqrt",
    "aten.sqrt_",
    "aten.rsqrt",
    "aten.rsqrt_",
)
def power(semantics: Semantics, x: Value) -> Value:
    """Powers multiply the logarithm of a scale; roots divide it, which is a relation as well."""
    ids = semantics.activation(x)
    name = semantics.place.op.removeprefix("aten.").rstrip("_")
    if name in ("square", "reciprocal"):
        return semantics.product((2 if name == "square" else -1, ids))
    root = semantics.root(ids, 2)
    return root if name == "sqrt" else semantics.product((-1, root))


@rule("aten.pow", "aten.pow_")
def pow_(semantics: Semantics, x: Any, exponent: Any) -> Value:
    """Integer powers (and square roots) scale; other powers fix."""
    if isinstance(exponent, int | float) and isinstance(x, Tensor | Weight):
        ids = semantics.activation(x)
        if float(exponent).is_integer() and abs(exponent) <= 8:
            return semantics.product((int(exponent), ids)) if exponent else constant(ids.shape)
        if exponent in (0.5, -0.5):
            root = semantics.root(ids, 2)
            return root if exponent > 0 else semantics.product((-1, root))
    values = [semantics.activation(v) for v in (x, exponent)]
    semantics.pin(values, "a power with a free exponent is not homogeneous")
    return constant(torch.broadcast_shapes(*(v.shape for v in values)))


@rule("aten.addcmul", "aten.addcmul_")
def addcmul(semantics: Semantics, x: Any, y: Any, z: Any, **kwargs: Any) -> Tensor:
    """``x + a y z``."""
    return semantics.join(semantics.activation(x), semantics.activation(mul(semantics, y, z)))


@rule("aten.prelu", "aten._prelu_kernel")
def prelu(semantics: Semantics, x: Value, slope: Value) -> Tensor:
    """``max(x, 0) + a min(x, 0)``: the slope is an edge from a unit to itself."""
    ids = semantics.activation(x)
    if not isinstance(slope, Weight):
        return ids
    wanted = (1, -1) + (1,) * (ids.dim() - 2) if len(slope.shape) == 1 and ids.dim() > 1 else tuple(slope.shape)
    return semantics.loop(slope.moved(lambda t: t.reshape(wanted), semantics.offsets), ids)
