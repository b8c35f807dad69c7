"""Elementwise operations of several operands, powers, and choices."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from ..handwritten_norms import is_parameter_itself
from ..registry import facts_of, rule, state
from ..semantics import Semantics
from ..values import NEUTRAL, Value, Weight, broadcast_shape, compress, constant, reshaped, value_of
from .edges import (
    arguments_of,
    as_factor,
    edges,
    has_fixed_scale,
    is_constant,
    negligible,
    power_product,
    times,
)

# a clamp at most here, as in F.normalize, is a floor that nothing but zero meets
FLOOR = 1e-12
INFINITE = (float("inf"), -float("inf"))


# properties of sums of operands with coefficients
COMBINED: dict[str, Any] = {"degree": (1,), "linear": "jointly", "elementwise": True}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | bool)


@rule("aten.add", "aten.sub", kind="sum", **COMBINED)
@rule("aten.rsub", kind="combination", **COMBINED)
def add(semantics: Semantics, x: Any, y: Any, *args: Any, **kwargs: Any) -> Value:
    """``c x + c y = c (x + y)``: the operands of a sum or difference share one scale."""
    if _is_number(y) and y != 0:
        alpha = args[0] if args else kwargs.get("alpha", 1)
        if alpha == 1 and negligible(semantics, y, x):
            return x  # type: ignore[no-any-return]
        sum_ = shifted(semantics, x, y, alpha)
        if sum_ is not None:
            return sum_
        semantics.opaque([semantics.activation(x)], "a constant is added")
    return semantics.join(as_factor(x), as_factor(y))


def shifted(semantics: Semantics, x: Any, constant: float, alpha: Any) -> Weight | None:
    """A whole parameter plus a constant: ``w`` is rescaled to ``s (w + c) - c``."""
    node, name = semantics.place.node, semantics.place.op.removeprefix("aten.")
    if not (
        isinstance(x, Weight)
        and x.name is not None
        and x.index.numel() == prod(semantics.shapes[x.name])
        and semantics.affine
        and node is not None
        and node.graph is semantics.graph
        and is_parameter_itself(node.args[0], semantics.sources)
        and alpha
        and isfinite(constant)
    ):
        return None
    if name == "rsub":
        # c - a w = -a (w - c / a)
        return replace(x, shift=-float(constant) / alpha)
    return replace(x, shift=float(constant) * (alpha if name == "add" else -alpha))


@rule("aten.maximum", "aten.minimum", "aten.fmax", "aten.fmin", kind="maximum", degree=(1,),
      elementwise=True)  # fmt: skip
@rule("aten.hypot", kind="norm", degree=(1,), elementwise=True)
def shared_scale(semantics: Semantics, x: Value, y: Any) -> Tensor:
    """Homogeneous functions of two operands, which share one scale."""
    return semantics.join(x, y)


state("aten.complex", "aten.polar", kind="complex", elementwise=True)


@rule("aten.view_as_complex", "aten.view_as_complex_copy", "aten.view_as_real",
      "aten.view_as_real_copy", kind="complex", degree=(1,))  # fmt: skip
def as_complex(semantics: Semantics, x: Value) -> Tensor:
    """Real and imaginary parts share one scale."""
    if "as_complex" in semantics.place.op:
        return semantics.reduce(x, [-1])
    ids = semantics.activation(x)
    return ids.unsqueeze(-1).expand(*ids.shape, 2)


@rule("aten.lerp", kind="combination", elementwise=True)
def lerp(semantics: Semantics, x: Value, y: Value, weight: Any) -> Tensor:
    """``x + w (y - x)``."""
    if isinstance(weight, Tensor | Weight):
        semantics.pin([semantics.activation(weight)], "the weight of a mean")
    return semantics.join(x, y).expand(semantics.place.shape)


@rule("aten.where", kind="choice", **COMBINED)
def where(semantics: Semantics, condition: Value, x: Any, y: Any) -> Tensor:
    """A choice between operands, by a condition whose scale is fixed."""
    chosen = semantics.opaque([semantics.activation(condition)], "a condition compares values")
    one, other, known = semantics.activation(x), semantics.activation(y), value_of(condition)
    shape = semantics.place.shape
    if known is not None:
        return compress(torch.where(known, one, other).expand(shape))
    return times(semantics, semantics.join(one, other), chosen).expand(shape)


@rule("aten.masked_fill", kind="choice", **COMBINED)
def masked_fill(semantics: Semantics, x: Value, mask: Value, value: Any) -> Tensor:
    """Filling with zero or infinity keeps scales free."""
    return where(semantics, mask, value, x)


# --- products


@rule("aten.mul", kind="product", degree=(1, 1),
      linear="each", coefficients="one", elementwise=True)  # fmt: skip
def mul(semantics: Semantics, x: Any, y: Any) -> Value:
    """A product: a parameter is an edge, log-scales of two activations add up."""
    x, y = as_factor(x), as_factor(y)
    if not isinstance(y, Tensor | Weight):
        return x  # type: ignore[no-any-return]
    if not isinstance(x, Tensor | Weight):
        return y
    value, weight = (y, x) if isinstance(x, Weight) and isinstance(y, Tensor) else (x, y)
    if not isinstance(weight, Weight):
        return times(semantics, x, y)  # type: ignore[arg-type]
    if is_constant(value) and weight.shape == broadcast_shape(weight.shape, value.shape):
        # a parameter times constants is rescaled like the parameter
        fixed = has_fixed_scale(value)
        return weight if fixed else weight.masked((value != NEUTRAL).expand(weight.shape))
    # (as edges, all rows that data selects would have one tail, and of two parts of one tensor,
    # neither is an edge that the other enters)
    names = {each.name for each in (weight, value) if isinstance(each, Weight)}
    parts = isinstance(value, Weight) and names == {weight.name} != {None}
    value = semantics.activation(value)
    if parts or names & semantics.virtual.keys():
        return times(semantics, value, semantics.activation(weight))
    return edges(semantics, weight, value, ())


@rule("aten.div", kind="quotient", elementwise=True)
def div(semantics: Semantics, x: Any, y: Any, **kwargs: Any) -> Value:
    """A quotient: log-scales of two activations are subtracted."""
    if kwargs.get("rounding_mode") is not None:
        return semantics.opaque(
            [semantics.activation(v) for v in (x, y)], "rounding is not homogeneous"
        )
    if not isinstance(y, Tensor | Weight):
        return x  # type: ignore[no-any-return]
    if (
        has_fixed_scale(y)
        and isinstance(x, Weight)
        and x.shape == broadcast_shape(x.shape, y.shape)
    ):
        return x
    return times(semantics, semantics.activation(x), semantics.activation(y), -1)


@rule("aten.square", kind="power", degree=(2,), elementwise=True)
@rule("aten.sqrt", kind="power", degree=(0.5,), elementwise=True)
@rule("aten.reciprocal", kind="power", degree=(-1,), elementwise=True)
@rule("aten.rsqrt", kind="power", degree=(-0.5,), elementwise=True)
def fixed_power(semantics: Semantics, x: Value) -> Value:
    """A power multiplies the log-scale, and a root divides it; both are relations."""
    (degree,) = facts_of(semantics.place.op).degree
    return rational_power(semantics, semantics.activation(x), Fraction(degree))


def rational_power(semantics: Semantics, ids: Tensor, exponent: Fraction) -> Tensor:
    """A rational power of an activation."""
    if has_fixed_scale(ids):
        return ids
    if exponent.denominator > 1:
        ids = semantics.root(ids, exponent.denominator)
    return ids if exponent.numerator == 1 else power_product(semantics, (exponent.numerator, ids))


@rule("aten.pow", kind="power", elementwise=True)
def pow_(semantics: Semantics, x: Any, exponent: Any) -> Value:
    """Rational powers multiply the log-scale; other exponents fix it."""
    known = value_of(exponent) if isinstance(exponent, Tensor) else None
    if known is not None and known.numel() == 1 and not known.is_complex():
        exponent = known.item()
    if _is_number(exponent) and isinstance(x, Tensor | Weight):
        ids, close = semantics.activation(x), Fraction(exponent).limit_denominator(8)
        if exponent == 0:
            return constant(ids.shape)
        if abs(float(close) - exponent) < 1e-12 and abs(close) <= 8:
            return rational_power(semantics, ids, close)
    values = [semantics.activation(v) for v in (x, exponent)]
    return semantics.opaque(values, "a power with this exponent is not followed")


# --- one-sided functions


@rule("aten.clamp", "aten.clamp_min", "aten.clamp_max", kind="clip", elementwise=True, slope=1.0)
@rule("aten.hardtanh", kind="activation", elementwise=True, slope=1.0)
def clamp(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Tensor:
    """``min(max(x, low), high)``, homogeneous if all bounds are zero or infinite."""
    given = arguments_of(semantics, x, *args, **kwargs)
    bounds: list[Any] = [given.get(side, given.get(f"{side}_val")) for side in ("min", "max")]
    low, high = bounds
    ids = semantics.activation(x)
    for bound in (low, high):
        if isinstance(bound, Tensor | Weight):
            ids = semantics.join(ids, semantics.activation(bound))
    shown = semantics.place.result
    # (a bound at the limit of the operand's type is never met)
    largest = torch.finfo(shown.dtype).max if shown.dtype.is_floating_point else float("inf")
    numbered = [(bound, sign) for bound, sign in ((low, -1), (high, 1)) if _is_number(bound)]
    numbers = [b for b, sign in numbered if b not in (0, *INFINITE) and sign * b < largest]
    # max(x, eps) protects a division: without eps it is a rectifier
    # (a norm is below the smallest of such floors only where it is zero)
    guard = numbers == [low] and low > 0 and negligible(semantics, float(low), ids, low <= FLOOR)
    if numbers and not guard:
        clips = semantics.place.op != "aten.hardtanh"
        how = "clamping at a number is not homogeneous" if clips else "not positively homogeneous"
        return semantics.opaque([ids], how)
    return ids


@rule("aten.prelu", "aten._prelu_kernel", kind="activation", elementwise=True)
def prelu(semantics: Semantics, x: Value, slope: Value) -> Tensor:
    """``max(x, 0) + a min(x, 0)``: a slope has the scale 1."""
    ids = semantics.activation(x)
    if isinstance(slope, Weight) and len(slope.shape) == 1 and ids.dim() > 1:
        wanted = (1, slope.shape[0], *(1 for _ in ids.shape[2:]))
        slope = slope.moved(lambda t: reshaped(t, wanted), semantics.offsets)
    return semantics.join(ids, mul(semantics, ids, slope))


state("aten.threshold", kind="activation", elementwise=True)
state("aten.addcmul", kind="combination", degree=(1, 1), linear="each", elementwise=True, bias=0)
state("aten.glu", kind="gate")


# --- comparisons


def looked_at(semantics: Semantics, *values: Any) -> Any:
    """A function that does not depend on the scale of its operands if they share one."""
    seen, shown = semantics.observe(semantics.join(*values)), semantics.place.result
    if not isinstance(shown, Tensor):
        return shown
    return seen if seen.shape == shown.shape else constant(semantics.place.shape)


@rule(
    "aten.gt", "aten.lt", "aten.ge", "aten.le", "aten.eq", "aten.ne", "aten.equal", "aten.atan2",
    kind="comparison", elementwise=True,
)  # fmt: skip
def comparison(semantics: Semantics, x: Value, y: Any) -> Any:
    """Comparisons with zero, or between operands with one scale, do not depend on the scale."""
    if _is_number(y) and y not in (0, *INFINITE):
        return semantics.opaque([semantics.activation(x)], "a comparison with a number")
    return looked_at(semantics, x, y)


@rule("aten.sign", "aten.sgn", "aten.signbit", "aten.angle", "aten.isnan", "aten.isinf",
      "aten.isfinite", "aten.logical_not", kind="comparison", degree=(0,),
      elementwise=True)  # fmt: skip
@rule("aten.nonzero", kind="comparison")
def sign(semantics: Semantics, x: Any) -> Any:
    """Signs and directions do not depend on a positive scale."""
    return looked_at(semantics, x)


@rule("aten.logical_and", "aten.logical_or", "aten.logical_xor", "aten.__and__", "aten.__or__",
      "aten.bitwise_and", "aten.bitwise_or", kind="comparison", elementwise=True)  # fmt: skip
def logical(semantics: Semantics, x: Any, y: Any) -> Tensor:
    """Functions of whether each operand is zero."""
    seen = [
        semantics.observe(semantics.activation(value))
        for value in (x, y)
        if isinstance(value, Tensor | Weight)
    ]
    return semantics.join(*seen).expand(semantics.place.shape)
