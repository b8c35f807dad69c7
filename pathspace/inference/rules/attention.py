"""Attention as one operation, and the fused layers of torch for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import Value, Weight, reshaped
from .contraction import contract_ids, linear
from .edges import times, with_others
from .normalization import layer_norm


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
    """``softmax(q k^T + mask) v``: queries and keys have opposite scales per
    feature, values pass theirs on.
    """
    q, k, v = (semantics.activation(entry) for entry in (query, key, value))
    if kwargs.get("enable_gqa") and k.shape[-3] != q.shape[-3]:
        k, v = (
            torch.repeat_interleave(entry, q.shape[-3] // entry.shape[-3], -3) for entry in (k, v)
        )
    scores = contract_ids(semantics, q.unsqueeze(-2), k.unsqueeze(-3), [-1])
    mask = kwargs.get("attn_mask", mask)
    if isinstance(mask, Tensor | Weight):
        semantics.fix(semantics.activation(mask))
    chances = semantics.opaque([scores], "", [-1])
    # every token can attend to every other
    tokens = semantics.reduce(v, [-2], keepdim=True)
    return times(semantics, tokens, semantics.reduce(chances, [-1], keepdim=True))


@rule("aten._scaled_dot_product_flash_attention",
      "aten._scaled_dot_product_flash_attention_for_cpu",
      "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
      "aten._scaled_dot_product_attention_math",
      "aten._scaled_dot_product_fused_attention_overrideable",
      kind="attention")  # fmt: skip
def fused_attention(
    semantics: Semantics, query: Value, key: Value, value: Value, *args: Any, **kwargs: Any
) -> Any:
    """Attention that also returns tensors for its backward pass."""
    masks = [
        arg
        for arg in (*args, kwargs.get("attn_mask"), kwargs.get("attn_bias"))
        if isinstance(arg, Tensor | Weight)
    ]
    mask = masks[0] if masks else None
    return with_others(semantics, attention(semantics, query, key, value, mask, enable_gqa=True))


def _heads(ids: Tensor, heads: int) -> Tensor:
    batch, length, size = ids.shape
    return reshaped(ids, (batch, length, heads, size // heads)).transpose(1, 2)


def _multi_head(
    semantics: Semantics, inputs: tuple[Value, Value, Value], heads: int, weight: Value,
    bias: Value, out_weight: Value, out_bias: Value, mask: Value | None,
) -> Tensor:  # fmt: skip
    size = weight.shape[0] // 3
    parts = [
        tuple(
            semantics.moved(lambda t, i=i: t.narrow(0, i * size, size), value)  # type: ignore[misc]
            for value in (weight, bias)
        )
        for i in range(3)
    ]
    q, k, v = (
        _heads(linear(semantics, x, own, shift), heads)
        for x, (own, shift) in zip(inputs, parts, strict=True)
    )
    fixed = None if mask is None else semantics.activation(mask)
    if fixed is not None:
        semantics.pin([fixed], "an attention mask")
    mixed = attention(semantics, q, k, v).transpose(1, 2)
    return linear(semantics, reshaped(mixed, (*mixed.shape[:2], -1)), out_weight, out_bias)


@rule("aten._native_multi_head_attention", kind="attention")
def native_multi_head(
    semantics: Semantics, query: Value, key: Value, value: Value, size: int, heads: int,
    weight: Value, bias: Value,
    out_weight: Value, out_bias: Value, mask: Value | None = None, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """``nn.MultiheadAttention`` in one operation."""
    out = _multi_head(
        semantics, (query, key, value), heads, weight, bias, out_weight, out_bias, mask
    )
    return with_others(semantics, out)


@rule("aten._transformer_encoder_layer_fwd", kind="attention")
def encoder_layer(
    semantics: Semantics, x: Value, size: int, heads: int, weight: Value, bias: Value,
    out_weight: Value,
    out_bias: Value, use_gelu: bool, norm_first: bool, eps: float, gamma1: Value, beta1: Value,
    gamma2: Value,
    beta2: Value, up: Value, up_bias: Value, down: Value, down_bias: Value,
    mask: Value | None = None, *args: Any,
) -> Tensor:  # fmt: skip
    """``nn.TransformerEncoderLayer`` in one operation."""
    ids = semantics.activation(x)

    def attend(y: Tensor) -> Tensor:
        return _multi_head(semantics, (y, y, y), heads, weight, bias, out_weight, out_bias, mask)

    def feed(y: Tensor) -> Tensor:
        hidden = linear(semantics, y, up, up_bias)
        if use_gelu:
            hidden = semantics.opaque([hidden], "not positively homogeneous")
        return linear(semantics, hidden, down, down_bias)

    def norm(y: Tensor, gamma: Value, beta: Value) -> Tensor:
        shown, semantics.place.result = semantics.place.result, torch.empty(y.shape, device="meta")
        out: Tensor = layer_norm(semantics, y, [size], gamma, beta, eps)
        semantics.place.result = shown
        return out

    if norm_first:
        ids = semantics.join(ids, attend(norm(ids, gamma1, beta1)))
        return semantics.join(ids, feed(norm(ids, gamma2, beta2)))
    ids = norm(semantics.join(ids, attend(ids)), gamma1, beta1)
    return norm(semantics.join(ids, feed(ids)), gamma2, beta2)
