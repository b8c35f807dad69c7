"""Homogeneous operations of one operand, elementwise: the ids do not change."""

from __future__ import annotations

from typing import Any

from ..registry import rule
from ..semantics import Semantics
from ..values import Value
from .edges import with_others


@rule("aten.relu", kind="activation", degree=(1,), elementwise=True, slope=1.0)
@rule("aten.leaky_relu", "aten.rrelu", "aten.rrelu_with_noise", kind="activation", degree=(1,),
      elementwise=True)  # fmt: skip
@rule("aten.dropout", "aten.feature_dropout", "aten.native_dropout", kind="dropout", degree=(1,),
      elementwise=True)  # fmt: skip
@rule("aten.abs", kind="magnitude", degree=(1,), elementwise=True, slope=1.0)
@rule("aten.neg", kind="combination", degree=(1,), linear="jointly", elementwise=True)
@rule("aten.detach", "aten.clone", "aten.contiguous", "aten.alias", "aten.lift_fresh",
      "aten.lift_fresh_copy", "aten.positive", "aten.float", "aten.double", "aten.half",
      "aten.requires_grad_", kind="copy", degree=(1,), linear="jointly", coefficients="one",
      elementwise=True)  # fmt: skip
@rule("aten.to", "aten._to_copy", "aten.type_as", kind="copy", elementwise=True)
@rule("aten.real", "aten.imag", "aten.conj", "aten._conj", "aten.resolve_conj", kind="complex",
      degree=(1,), elementwise=True)  # fmt: skip
def homogeneous(semantics: Semantics, x: Value, *args: Any, **kwargs: Any) -> Any:
    """``f(c x) = c f(x)`` elementwise for ``c > 0``: the ids do not change."""
    return with_others(semantics, x)
