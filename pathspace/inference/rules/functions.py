"""Functions of single elements, homogeneous or not, and tensors that are created."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import NEUTRAL, Value, constant, constants_like, flat_values
from .edges import with_others


@rule("aten.zeros_like", "aten.new_zeros", kind="creation")
def zeros(semantics: Semantics, *args: Any, **kwargs: Any) -> Tensor:
    """Exact zeros, which have any scale."""
    return constant(semantics.place.shape, NEUTRAL)


@rule("aten.empty", "aten.empty_like", "aten.new_empty", "aten.new_empty_strided", "aten.ones_like",
      "aten.new_ones", "aten.full_like", "aten.new_full", kind="creation")  # fmt: skip
@rule("aten.rand", "aten.randn", "aten.randint", "aten.rand_like", "aten.randn_like",
      "aten.randint_like", "aten.randperm", "aten.normal_", "aten.normal_functional",
      "aten.uniform", "aten.exponential", "aten.random", "aten.bernoulli_",
      kind="random")  # fmt: skip
def made(semantics: Semantics, *args: Any, **kwargs: Any) -> Tensor:
    """A constant or random tensor."""
    return constant(semantics.place.shape)


@rule("aten.sym_size", "aten.size", "aten.sym_numel", "aten.numel", kind="size")
def size(semantics: Semantics, x: Value, dim: int | None = None) -> Any:
    """Sizes are plain numbers."""
    return semantics.place.result


@rule("aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range_for_size",
      "aten._assert_scalar", "aten.sym_constrain_range", kind="size")  # fmt: skip
def nothing(semantics: Semantics, *args: Any, **kwargs: Any) -> None:
    """Checks, which do not affect scales."""


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


# --- functions that are not homogeneous, which fix the scales of their operands


def _pins(reason: str, kind: str, names: str, **stated: Any) -> None:
    @rule(*(f"aten.{name}" for name in names.split()), kind=kind, **stated)
    def pinned(semantics: Semantics, *args: Any, **kwargs: Any) -> Any:
        values = flat_values((args, kwargs))
        bend = (*args[1:2], *kwargs.values())[:1]
        if semantics.place.op.removeprefix("aten.") in STRAIGHT_AT_ZERO and bend == (0,):
            return semantics.activation(args[0])
        if stated.get("elementwise"):
            return semantics.opaque(values, reason)
        semantics.pin(values, reason)
        return constants_like(semantics.place.result)


@rule("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax",
      "aten._safe_softmax", "aten.logsumexp", "aten.logcumsumexp", kind="softmax")  # fmt: skip
def normalised(semantics: Semantics, x: Value, dim: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A function of slices along dimensions, which the result may not have."""
    dims, shape = [dim] if isinstance(dim, int) else dim, semantics.place.shape
    ids = semantics.opaque([x], "normalised exponentials depend on scale", dims)
    if tuple(ids.shape) == shape:
        return ids
    return semantics.reduce(ids, dims, keepdim=ids.dim() == len(shape))


BENT = "not positively homogeneous"
# with these the first option is the size of the bend: for 0 they are
# rectifiers, or copy their operand
STRAIGHT_AT_ZERO = frozenset(["elu", "softshrink", "hardshrink"])
# activation function -> its largest slope with default arguments, or None
SLOPES: dict[str, float | None] = {
    "tanh": 1.0, "sigmoid": 0.25, "relu6": 1.0, "hardsigmoid": 1 / 6, "softsign": 1.0,
    "softplus": 1.0,
    "logsigmoid": 1.0, "log_sigmoid": 1.0, "tanhshrink": 1.0, "special_expit": 0.25,
    "hardswish": 1.5, "silu": 1.1,
    "gelu": 1.13, "mish": 1.09, "selu": 1.7581, "softshrink": 1.0, "elu": None, "celu": None,
    "hardshrink": None, "log_sigmoid_forward": None,
}  # fmt: skip
for _name, _slope in SLOPES.items():
    _pins(BENT, "activation", _name, elementwise=_name != "log_sigmoid_forward", slope=_slope)
_pins(BENT, "function", "sin cos atan asinh", elementwise=True, slope=1.0)
_pins(
    BENT,
    "function",
    "exp exp2 expm1 log log2 log10 log1p tan cosh sinh atanh erfinv logit lgamma digamma polygamma"
    " xlogy special_xlogy asin acos acosh sinc erf erfc special_erf special_i0 i0 logaddexp"
    " logaddexp2 fmod remainder entr special_entr special_ndtr special_log_ndtr",
    elementwise=True,
)
_pins(
    "rounding is not homogeneous",
    "rounding",
    "round floor ceil trunc fix frac fake_quantize_per_tensor_affine",
    elementwise=True,
)
