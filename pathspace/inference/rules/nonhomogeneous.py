"""Operations that are known not to be homogeneous: they fix the scale of what they read."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.inference.registry import rule
from pathspace.inference.semantics import Semantics
from pathspace.inference.values import Weight, constant, shape_of


def _pins(reason: str, *names: str) -> None:
    @rule(*(f"aten.{name}{end}" for name in names for end in ("", "_")))
    def pinned(semantics: Semantics, *args: Any, **kwargs: Any) -> Any:
        values = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | Weight)]
        semantics.pin(values, reason)
        return pytree.tree_map(
            lambda leaf: constant(shape_of(leaf)) if isinstance(leaf, Tensor) else leaf, semantics.place.result
        )


_pins(
    "not positively homogeneous",
    *["gelu", "silu", "tanh", "sigmoid", "elu", "selu", "celu", "mish", "softplus", "softsign", "relu6", "hardswish"],
    *["hardsigmoid", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logsigmoid", "log_sigmoid"],
    *["log_sigmoid_forward", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"],
    *["sinc", "erf", "erfc", "erfinv", "logit", "lgamma", "digamma", "polygamma", "special_expit", "special_erf"],
    *["special_i0", "i0", "logaddexp", "logaddexp2", "xlogy", "special_xlogy", "hardshrink", "softshrink"],
    *["tanhshrink", "fmod", "remainder", "deg2rad", "entr", "special_entr", "special_ndtr", "special_log_ndtr"],
)
_pins(
    "rounding is not homogeneous", "round", "floor", "ceil", "trunc", "fix", "frac", "fake_quantize_per_tensor_affine"
)
_pins(
    "normalised exponentials depend on scale",
    *["softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp", "logcumsumexp", "softmin", "_safe_softmax"],
)
_pins(
    "a loss that is not homogeneous",
    *["cross_entropy_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "huber_loss"],
    *["smooth_l1_loss", "poisson_nll_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "gaussian_nll_loss", "ctc_loss"],
    *["mse_loss", "l1_loss", "soft_margin_loss", "multi_margin_loss", "triplet_margin_loss", "nll_loss_forward"],
    *["nll_loss2d_forward", "multilabel_margin_loss", "hinge_embedding_loss", "margin_ranking_loss"],
)
_pins("a comparison with a number, or of scales that may differ", "multinomial", "bucketize", "searchsorted", "histc")
_pins("matrix functions are not followed", "linalg_inv", "inverse", "linalg_solve", "linalg_svd", "linalg_qr",
      "linalg_cholesky", "cholesky", "linalg_eigh", "linalg_eig", "linalg_det", "linalg_slogdet", "logdet", "det",
      "linalg_matrix_exp", "matrix_exp", "linalg_householder_product", "linalg_pinv", "linalg_lstsq",
      "linalg_solve_triangular", "triangular_solve", "linalg_lu", "linalg_lu_factor")  # fmt: skip
