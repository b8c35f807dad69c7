"""Operations that are not homogeneous: they fix the scales of their operands."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..registry import rule
from ..semantics import Semantics
from ..values import Value, Weight, constant, shape_of


def _pins(reason: str, kind: str, *names: str, **stated: Any) -> None:
    @rule(*(f"aten.{name}{end}" for name in names for end in ("", "_")), kind=kind, **stated)
    def pinned(semantics: Semantics, *args: Any, **kwargs: Any) -> Any:
        values = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | Weight)
        ]
        bend = (*args[1:2], *kwargs.values())[:1]
        if semantics.place.op.removeprefix("aten.").rstrip("_") in STRAIGHT_AT_ZERO and bend == (
            0,
        ):
            return semantics.activation(args[0])
        if stated.get("elementwise"):
            return semantics.opaque(values, reason)
        semantics.pin(values, reason)
        return pytree.tree_map(
            lambda leaf: constant(shape_of(leaf)) if isinstance(leaf, Tensor) else leaf,
            semantics.place.result,
        )


def _along(reason: str, kind: str, *names: str, **stated: Any) -> None:
    @rule(*(f"aten.{name}{end}" for name in names for end in ("", "_")), kind=kind, **stated)
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
    *[
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "tan",
        "cosh",
        "sinh",
        "atanh",
        "erfinv",
        "logit",
        "lgamma",
    ],
    *["digamma", "polygamma", "xlogy", "special_xlogy", "exp"],
    elementwise=True,
    infinite=True,
)
for _name in ("sin", "cos", "atan", "asinh"):
    _pins(BENT, "function", _name, elementwise=True, slope=1.0)
_pins(
    BENT,
    "function",
    *[
        "asin",
        "acos",
        "acosh",
        "sinc",
        "erf",
        "erfc",
        "special_erf",
        "special_i0",
        "i0",
        "logaddexp",
        "logaddexp2",
        "fmod",
    ],
    *["remainder", "deg2rad", "entr", "special_entr", "special_ndtr", "special_log_ndtr"],
    elementwise=True,
)
_pins(
    "rounding is not homogeneous",
    "rounding",
    *["round", "floor", "ceil", "trunc", "fix", "frac", "fake_quantize_per_tensor_affine"],
    elementwise=True,
)
_along(
    "normalised exponentials depend on scale",
    "softmax",
    *["softmax", "log_softmax", "_softmax", "_log_softmax", "softmin", "_safe_softmax"],
)
_along(
    "normalised exponentials depend on scale", "softmax", "logsumexp", "logcumsumexp", infinite=True
)
_pins(
    "a loss that is not homogeneous",
    "loss",
    *[
        "cross_entropy_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "huber_loss",
    ],
    *[
        "smooth_l1_loss",
        "poisson_nll_loss",
        "nll_loss",
        "nll_loss_nd",
        "nll_loss2d",
        "gaussian_nll_loss",
        "ctc_loss",
    ],
    *[
        "mse_loss",
        "l1_loss",
        "soft_margin_loss",
        "multi_margin_loss",
        "triplet_margin_loss",
        "nll_loss_forward",
    ],
    *[
        "nll_loss2d_forward",
        "multilabel_margin_loss",
        "hinge_embedding_loss",
        "margin_ranking_loss",
    ],
)
_pins("a comparison with a number, or of scales that may differ", "random", "multinomial")
_pins(
    "a comparison with a number, or of scales that may differ",
    "comparison",
    "bucketize",
    "searchsorted",
    "histc",
)
_pins(
    "matrix functions are not followed",
    "matrix function",
    *[
        "linalg_inv",
        "inverse",
        "linalg_solve",
        "linalg_svd",
        "linalg_qr",
        "linalg_cholesky",
        "cholesky",
    ],
    *[
        "linalg_eigh",
        "linalg_eig",
        "linalg_det",
        "linalg_slogdet",
        "logdet",
        "det",
        "linalg_matrix_exp",
        "matrix_exp",
    ],
    *[
        "linalg_householder_product",
        "linalg_pinv",
        "linalg_lstsq",
        "linalg_solve_triangular",
        "triangular_solve",
    ],
    *["linalg_lu", "linalg_lu_factor"],
    infinite=True,
)
