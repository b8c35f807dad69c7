"""Linear maps whose weight is a parameter: each scalar weight is an edge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.inference.registry import rule
from pathspace.inference.rules.windows import pair, windows
from pathspace.inference.semantics import Semantics
from pathspace.inference.values import Value, Weight, constant

LARGEST = 2_000_000


def _with_bias(semantics: Semantics, out: Tensor, bias: Value | None, dim: int) -> Tensor:
    if bias is None:
        return out
    shape = [1] * out.dim()
    shape[dim] = -1
    ids = semantics.attach(bias) if isinstance(bias, Weight) else bias
    return semantics.join(out, ids.reshape(shape))


def contract_ids(semantics: Semantics, left: Tensor, right: Tensor, dims: Sequence[int]) -> Tensor:
    """``sum over dims of left * right`` for two activations, broadcast against each other: scales add up.

    Along a summed dimension the product must have one scale. Where one operand does not vary there, the other cannot
    either, and is unified first, so that nothing larger than the ids that differ is ever formed.
    """
    full = torch.broadcast_shapes(left.shape, right.shape)
    left, right = left.expand(full), right.expand(full)
    for dim in {d % len(full) for d in dims}:
        if left.stride(dim) == 0 and right.stride(dim) != 0:
            right = semantics.reduce(right, [dim], keepdim=True).expand(full)
        elif right.stride(dim) == 0 and left.stride(dim) != 0:
            left = semantics.reduce(left, [dim], keepdim=True).expand(full)
    varying = [n if left.stride(d) or right.stride(d) else 1 for d, n in enumerate(full)]
    if math.prod(varying) > LARGEST:
        semantics.pin([left, right], "a product of activations whose scales vary in too many ways to follow")
        return constant([n for d, n in enumerate(full) if d not in {e % len(full) for e in dims}])
    return semantics.reduce(semantics.product((1, left), (1, right)), dims)


@rule("aten.linear")
def linear(semantics: Semantics, x: Value, weight: Value, bias: Value | None = None) -> Tensor:
    """``y[..., o] = sum_i W[o, i] x[..., i] + b[o]``; a weight that is computed counts as an activation."""
    ids = semantics.activation(x)
    lead = (1,) * (ids.dim() - 1)
    if isinstance(weight, Weight):
        view = weight.moved(lambda t: t.reshape(*lead, *t.shape), semantics.offsets)
        out = semantics.contract(view, ids.unsqueeze(-2), [-1])
    else:
        out = contract_ids(semantics, weight.reshape(*lead, *weight.shape), ids.unsqueeze(-2), [-1])
    return _with_bias(semantics, out, bias, -1)


@rule("aten.addmm", "aten.baddbmm", "aten.addbmm")
def addmm(semantics: Semantics, bias: Value, x: Value, weight: Value, **kwargs: Any) -> Tensor:
    """``b + x W`` with ``W`` of shape (in, out)."""
    return semantics.join(bias, matmul(semantics, x, weight))


@rule("aten.mm", "aten.matmul", "aten.bmm", "aten.mv", "aten.dot", "aten.vdot", "aten.inner")
def matmul(semantics: Semantics, x: Value, y: Value) -> Tensor:
    """A product of matrices, each a parameter or an activation."""
    if isinstance(y, Weight) and len(y.shape) == 2:
        return linear(semantics, semantics.activation(x), y.moved(lambda t: t.t(), semantics.offsets))
    if isinstance(x, Weight) and len(x.shape) == 2:
        right = semantics.activation(y)
        if right.dim() == 1:
            return linear(semantics, right, x)
        return linear(semantics, right.transpose(-1, -2), x).transpose(-1, -2)
    if isinstance(x, Weight) and isinstance(y, Tensor) and len(x.shape) > 2 and y.dim() >= 2:
        # a stack of matrices, one for each leading index
        view = x.moved(lambda t: t.unsqueeze(-1), semantics.offsets)
        return semantics.contract(view, y.unsqueeze(-3), [-2])
    if isinstance(y, Weight) and isinstance(x, Tensor) and len(y.shape) > 2 and x.dim() >= 2:
        view = y.moved(lambda t: t.unsqueeze(-3), semantics.offsets)
        return semantics.contract(view, x.unsqueeze(-1), [-2])
    left, right = semantics.activation(x), semantics.activation(y)
    if left.dim() == 1 and right.dim() == 1:
        return contract_ids(semantics, left, right, [-1])
    if right.dim() == 1:
        return contract_ids(semantics, left, right, [-1])
    if left.dim() == 1:
        return contract_ids(semantics, left.unsqueeze(-1), right, [-2])
    return contract_ids(semantics, left.unsqueeze(-1), right.unsqueeze(-3), [-2])


@rule("aten.einsum")
def einsum(semantics: Semantics, equation: str, operands: Sequence[Value], **kwargs: Any) -> Tensor:
    """Sums of products by index letters; more than two operands are taken one after the other."""
    equation = equation.replace(" ", "")
    inputs, output = equation.split("->") if "->" in equation else (equation, None)
    terms = inputs.split(",")
    if "." in equation or output is None or any(len(set(term)) != len(term) for term in terms):
        raise ValueError("einsum with an ellipsis, a diagonal or an implicit output")
    letters, value = terms[0], operands[0]
    if len(operands) == 1:
        ids = semantics.activation(value)
        lost = [i for i, letter in enumerate(letters) if letter not in output]
        kept = [letter for letter in letters if letter in output]
        return semantics.reduce(ids, lost).permute([kept.index(letter) for letter in output])
    for position, (term, other) in enumerate(zip(terms[1:], operands[1:], strict=True), start=2):
        later = set(output).union(*terms[position:])
        every = list(dict.fromkeys(letters + term))
        sides = []
        for names, operand in ((letters, value), (term, other)):
            order = [names.index(letter) for letter in every if letter in names]
            shape = [letter in names for letter in every]

            def align(t: Tensor, order: list[int] = order, shape: list[bool] = shape) -> Tensor:
                t = t.permute(order)
                for dim, present in enumerate(shape):
                    t = t if present else t.unsqueeze(dim)
                return t

            sides.append(operand.moved(align, semantics.offsets) if isinstance(operand, Weight) else align(operand))
        lost = [i for i, letter in enumerate(every) if letter not in later]
        left, right = sides
        if isinstance(left, Weight) and isinstance(right, Weight):
            left = semantics.attach(left)
        if isinstance(left, Weight):
            value = semantics.contract(left, right, lost)
        elif isinstance(right, Weight):
            value = semantics.contract(right, left, lost)
        else:
            value = contract_ids(semantics, left, right, lost)
        letters = "".join(letter for letter in every if letter in later)
    assert isinstance(value, Tensor)
    return value.permute([letters.index(letter) for letter in output])


@rule("aten.scaled_dot_product_attention")
def attention(
    semantics: Semantics, query: Value, key: Value, value: Value, mask: Value | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """``softmax(q k^T + mask) v``: queries and keys have opposite scales per feature, values pass theirs on."""
    q, k, v = (semantics.activation(entry) for entry in (query, key, value))
    if kwargs.get("enable_gqa") and k.shape[-3] != q.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = (torch.repeat_interleave(entry, repeats, -3) for entry in (k, v))
    scores = contract_ids(semantics, q.unsqueeze(-2), k.unsqueeze(-3), [-1])
    if isinstance(mask, Tensor | Weight):
        scores = semantics.join(scores, semantics.activation(mask))
    semantics.fix(scores)
    # every token may be looked at by every other
    tokens = semantics.reduce(v, [-2], keepdim=True)
    return tokens.expand(*v.shape[:-2], q.shape[-2], v.shape[-1]).expand(semantics.place.result.shape)


@rule("aten.embedding")
def embedding(semantics: Semantics, weight: Value, index: Value, *args: Any, **kwargs: Any) -> Tensor:
    """Rows looked up by position: every row enters the same units, since data decides which is read."""
    if not isinstance(weight, Weight):
        ids = semantics.reduce(weight, [0])
        return ids.expand(*index.shape, weight.shape[-1])
    ones = constant((weight.shape[0], 1))
    heads = semantics.contract(
        weight.moved(lambda t: t.t().unsqueeze(0), semantics.offsets), ones.reshape(1, 1, -1), [-1]
    )
    return heads.reshape(-1).expand(*index.shape, weight.shape[-1])


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(
    semantics: Semantics,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Channels are units; the taps of a kernel are parallel edges."""
    ids = semantics.activation(x)
    rank = len(weight.shape) - 2
    batched = ids.dim() == rank + 2
    if not batched:
        ids = ids.unsqueeze(0)
    kernel = list(weight.shape[2:])
    steps, holes = pair(stride, rank), pair(dilation, rank)
    if isinstance(padding, str):
        total = [h * (k - 1) if padding == "same" else 0 for h, k in zip(holes, kernel, strict=True)]
        margins = [(t // 2, t - t // 2) for t in total]
    else:
        margins = [(p, p) for p in pair(padding, rank)]
    # (N, C, out..., kernel...)
    seen = windows(semantics, ids, kernel, steps, margins, holes)
    batch, channels, sizes = seen.shape[0], seen.shape[1], list(seen.shape[2 : 2 + rank])
    seen = seen.reshape(batch, groups, 1, channels // groups, *sizes, *kernel)
    # (N, groups, 1, out..., C / groups, kernel...)
    seen = seen.permute(0, 1, 2, *range(4, 4 + rank), 3, *range(4 + rank, 4 + 2 * rank))
    summed = list(range(3 + rank, 4 + 2 * rank))
    outs = weight.shape[0]
    shape = [1, groups, outs // groups, *[1] * rank, channels // groups, *kernel]
    if isinstance(weight, Weight):
        out = semantics.contract(weight.moved(lambda t: t.reshape(shape), semantics.offsets), seen, summed)
    else:
        out = contract_ids(semantics, weight.reshape(shape), seen, summed)
    out = out.reshape(batch, math.prod(out.shape[1:3]), *sizes)
    out = _with_bias(semantics, out, bias, 1)
    return out if batched else out.squeeze(0)
