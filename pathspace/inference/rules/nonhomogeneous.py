"""Operations that are not homogeneous: they fix the scales of their operands."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..registry import rule
from ..semantics import Semantics
from ..values import Value, Weight, constant, shape_of


def _pins(reason: str, kind: str, names: str, **stated: Any) -> None:
    @rule(*(f"aten.{name}" for name in names.split()), kind=kind, **stated)
    def pinned(semantics: Semantics, *args: Any, **kwargs: Any) -> Any:
        values = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | Weight)
        ]
        bend = (*args[1:2], *kwargs.values())[:1]
        if semantics.place.op.removeprefix("aten.") in STRAIGHT_AT_ZERO and bend == (0,):
            return semantics.activation(args[0])
        if stated.get("elementwise"):
            return semantics.opaque(values, reason)
        semantics.pin(values, reason)
        return pytree.tree_map(
            lambda leaf: constant(shape_of(leaf)) if isinstance(leaf, Tensor) else leaf,
            semantics.place.result,
        )


def _along(reason: str, kind: str, names: str, **stated: Any) -> None:
    @rule(*(f"aten.{name}" for name in names.split()), kind=kind, **stated)
    def normalised(semantics: Semantics, x: Value, dim: Any, *args: Any, **kwargs: Any) -> Tensor:
        """A function of slices along dimensions, which the result may not have."""
        dims, shape = [dim] if isinstance(dim, int) else dim, shape_of(semantics.place.result)
        ids = semantics.opaque([x], reason, dims)
        return (
            ids
            if tuple(ids.shape) == shape
            else semantics.reduce(ids, dims, keepdim=ids.dim() == len(shape))
        )


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
_pins(
    BENT,
    "function",
    "exp exp2 expm1 log log2 log10 log1p tan cosh sinh atanh erfinv logit lgamma digamma polygamma"
    " xlogy special_xlogy",
    elementwise=True,
)
_pins(BENT, "function", "sin cos atan asinh", elementwise=True, slope=1.0)
_pins(
    BENT,
    "function",
    "asin acos acosh sinc erf erfc special_erf special_i0 i0 logaddexp logaddexp2 fmod remainder"
    " entr special_entr special_ndtr special_log_ndtr",
    elementwise=True,
)
_pins(
    "rounding is not homogeneous",
    "rounding",
    "round floor ceil trunc fix frac fake_quantize_per_tensor_affine",
    elementwise=True,
)
EXPONENTIALS = "normalised exponentials depend on scale"
_along(EXPONENTIALS, "softmax", "softmax log_softmax _softmax _log_softmax _safe_softmax")
_along(EXPONENTIALS, "softmax", "logsumexp logcumsumexp")
