"""Homogeneous operations of one operand, elementwise: the ids do not change.

Where ``nan_to_num`` or alpha dropout insert constants, they fix scales.
"""

from __future__ import annotations

import math
from typing import Any

from ..eps_detection import may_be_infinite
from ..registry import rule
from ..semantics import Semantics
from ..values import Value
from .edges import with_others


@rule("aten.relu", "aten.relu_", kind="activation", degree=(1,), elementwise=True, slope=1.0)
@rule(
    "aten.leaky_relu",
    "aten.leaky_relu_",
    "aten.rrelu",
    "aten.rrelu_",
    "aten.rrelu_with_noise",
    "aten.rrelu_with_noise_functional",
    kind="activation",
    degree=(1,),
    elementwise=True,
)
@rule(
    "aten.dropout",
    "aten.dropout_",
    "aten.feature_dropout",
    "aten.feature_dropout_",
    "aten.native_dropout",
    kind="dropout",
    degree=(1,),
    elementwise=True,
)
@rule(
    "aten.abs",
    "aten.abs_",
    "aten.absolute",
    kind="magnitude",
    degree=(1,),
    elementwise=True,
    slope=1.0,
)
@rule(
    "aten.neg",
    "aten.neg_",
    "aten.negative",
    kind="combination",
    degree=(1,),
    linear="jointly",
    elementwise=True,
)
@rule(
    "aten.detach",
    "aten.detach_",
    "aten.clone",
    "aten.contiguous",
    "aten.alias",
    "aten.lift_fresh",
    "aten.lift_fresh_copy",
    "aten.positive",
    "aten.float",
    "aten.double",
    "aten.half",
    "aten.resolve_neg",
    "aten.requires_grad_",
    kind="copy",
    degree=(1,),
    linear="jointly",
    coefficients="one",
    elementwise=True,
)
@rule("aten.to", "aten._to_copy", "aten.type_as", kind="copy", elementwise=True)
@rule("aten.real", "aten.imag", "aten.conj", "aten._conj", "aten.resolve_conj", kind="complex",
      degree=(1,), elementwise=True)  # fmt: skip
def homogeneous(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Any:
    """``f(c x) = c f(x)`` elementwise for ``c > 0`` (or the same for
    ``|f|``): the ids do not change.
    """
    return with_others(semantics, x)


@rule("aten.nan_to_num", "aten.nan_to_num_", kind="choice", elementwise=True)
def nan_to_num(semantics: Semantics, x: Value, *given: Any, **named: Any) -> Value:
    """Replace NaN and infinities; 0 and infinity have any scale, every
    other number has a fixed one.

    By default the largest number of the type replaces infinities, so it matters whether the
    operand can be infinite.
    """
    numbers = dict(zip(("nan", "posinf", "neginf"), given, strict=False)) | named
    fixed = any(number and math.isfinite(number) for number in numbers.values())
    default = any(numbers.get(name) is None for name in ("posinf", "neginf"))
    node = semantics.place.node
    if fixed or (default and (node is None or may_be_infinite(node, semantics.sources))):
        return semantics.opaque(
            [semantics.activation(x)], "numbers that stand for NaN or infinity are constants"
        )
    return x


@rule("aten.alpha_dropout", "aten.alpha_dropout_", "aten.feature_alpha_dropout",
      "aten.feature_alpha_dropout_", kind="dropout", elementwise=True)  # fmt: skip
def alpha_dropout(semantics: Semantics, x: Value, p: float = 0.5, train: bool = False) -> Value:
    """Alpha dropout, which adds constants to dropped elements in training, and
    has no effect otherwise.
    """
    if p and train:
        semantics.pin([semantics.activation(x)], "alpha dropout adds constants")
    return x
