"""Attention as one operation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import Value, Weight, along
from .contraction import contract_ids
from .edges import times


@rule("aten.scaled_dot_product_attention", kind="attention")
def attention(
    semantics: Semantics,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``softmax(q k^T + mask) v``: queries and keys have opposite scales."""
    q, k, v = (semantics.activation(entry) for entry in (query, key, value))
    if kwargs.get("enable_gqa") and k.shape[-3] != q.shape[-3]:
        k, v = (
            along(lambda t: t.repeat_interleave(q.shape[-3] // k.shape[-3], -3), entry, [-3])
            for entry in (k, v)
        )
    scores = contract_ids(semantics, q.unsqueeze(-2), k.unsqueeze(-3), [-1])
    mask = kwargs.get("attn_mask", mask)
    if isinstance(mask, Tensor | Weight):
        semantics.fix(semantics.activation(mask))
    chances = semantics.opaque([scores], "", [-1])
    # every token can attend to every other
    tokens = semantics.reduce(v, [-2], keepdim=True)
    return times(semantics, tokens, semantics.reduce(chances, [-1], keepdim=True))
