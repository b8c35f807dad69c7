"""Sums over paths through attention as one operation: paths end in its scores, and start
again in the chances that a softmax makes of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from ..inference.registry import FACTS, named_arguments
from .path_sums import Sum, added, as_sum, multiplied


def attended(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Any, p: float
) -> tuple[Sum, Sum] | None:
    """The sums of ``scale q k^T + mask``, where paths end, and of ``softmax(...) v``: all
    chances count as 1.

    Args:
        node: the operation.
        args: its operands.
        kwargs: its keyword operands.
        chosen: whether a tensor depends on data (its numbers mean nothing).
        p: exponent of the norm.

    Returns:
        Both; ``None`` if the operation has projections, too.
    """
    given = named_arguments(node.target, args, kwargs)
    if not {"query", "key", "value"} <= given.keys() or "num_heads" in given:
        return None
    q, k, v = (as_sum(given[name], p) for name in ("query", "key", "value"))
    if k.values.dim() > 2 and q.values.shape[-3] != k.values.shape[-3]:
        groups = q.values.shape[-3] // k.values.shape[-3]
        k, v = (Sum(one.values.repeat_interleave(groups, -3), one.log) for one in (k, v))
    scale = given.get("scale")
    scale = 1 / math.sqrt(q.values.shape[-1]) if scale is None else abs(float(scale))
    scores = multiplied(torch.matmul, FACTS["aten.matmul"], (q, _turned(k)), {}, p)
    kept = torch.ones(scores.values.shape[-2:], dtype=torch.bool)
    kept = kept.tril() if given.get("is_causal") else kept
    mask = given.get("attn_mask", given.get("attn_bias"))
    if isinstance(mask, Tensor) and not chosen(mask):
        # (no path passes an infinite entry)
        kept = kept & (mask.cpu() if mask.dtype == torch.bool else torch.isfinite(mask.cpu()))
    scores = Sum(scores.values * kept * scale**p, scores.log)
    if isinstance(mask, Sum) or (isinstance(mask, Tensor) and mask.is_floating_point()):
        scores = added(scores, as_sum(mask, p))
    tokens = Sum(v.values.sum(-2, keepdim=True), v.log)
    return scores, Sum(tokens.values.expand(*q.values.shape[:-1], -1), tokens.log)


def _turned(one: Sum) -> Sum:
    return Sum(one.values.transpose(-1, -2), one.log)
