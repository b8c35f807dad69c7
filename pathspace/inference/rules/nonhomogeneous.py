"""Operations that are known not to be homogeneous: they fix the scale of what they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.inference.registry import rule
from pathspace.inference.semantics import Semantics
from pathspace.inference.values import Weight, constant


def _pins(reason: str, *names: str) -> None:
    @rule(*(f"aten.{name}{end}" for name in names for end in ("", "_")))
    def pinned(semantics: Semantics, *args: Any, **kwargs: Any) -> Any:
        values = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | Weight)]
        semantics.pin([semantics.activation(value) for value in values], reason)
        return pytree.tree_map(
            lambda leaf: constant(leaf.shape) if isinstance(leaf, Tensor) else leaf, semantics.place.result
        )


_pins(
    "not positively homogeneous",
    *[
        "gelu",
        "silu",
        "tanh",
        "sigmoid",
        "elu",
        "selu",
        "celu",
        "mish",
        "softplus",
        "softsign",
        "hardtanh",
        "relu6",
        "hardswish",
        "hardsigmoid",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "logsigmoid",
        "log_sigmoid",
        "sin",
        "cos",
        "tan",
        "atan",
        "erf",
        "threshold",
        "hardshrink",
        "softshrink",
        "tanhshrink",
        "round",
        "floor",
        "ceil",
        "clamp",
        "clamp_min",
        "clamp_max",
        "clip",
    ],
)
_pins(
    "normalised exponentials depend on scale",
    *["softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp", "logcumsumexp"],
)
_pins(
    "a comparison of values",
    *[
        "gt",
        "lt",
        "ge",
        "le",
        "eq",
        "ne",
        "argmax",
        "argmin",
        "topk",
        "sort",
        "argsort",
        "isnan",
        "isinf",
        "bernoulli",
        "multinomial",
        "nonzero",
    ],
)


@rule("aten.sign", "aten.sgn", "aten.signbit")
def sign(semantics: Semantics, x: Any) -> Tensor:
    """Signs do not feel a positive scale."""
    return constant(x.shape)


@rule("aten.rand_like", "aten.randn_like", "aten.ones_like", "aten.empty_like", "aten.bernoulli")
def shaped_like(semantics: Semantics, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Only the shape is read (or the probabilities are constants)."""
    if semantics.place.op == "aten.bernoulli":
        semantics.pin([semantics.activation(x)], "a probability")
    return torch.tensor(0).expand(x.shape)
