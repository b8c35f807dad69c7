"""Sums of products: each scalar weight is an edge, scales of activations add up."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import Value, Weight, along, broadcast_shape
from .edges import edges, has_fixed_scale, times

# properties of every bilinear sum of products
BILINEAR: dict[str, Any] = {
    "kind": "contraction",
    "degree": (1, 1),
    "linear": "each",
    "coefficients": "one",
}


def contract_ids(semantics: Semantics, left: Tensor, right: Tensor, dims: Sequence[int]) -> Tensor:
    """``sum over dims of left * right`` for two activations: scales add up.

    A product has one scale along a summed dimension; an operand that is constant there makes the
    other constant, which comes first, so that no large tensor is created.
    """
    full = broadcast_shape(left.shape, right.shape)
    summed = {d % len(full) for d in dims}
    if has_fixed_scale(left) or has_fixed_scale(right):
        free, by = (right, left) if has_fixed_scale(left) else (left, right)
        return semantics.reduce(semantics.scaled(free, by).expand(full), summed)
    left, right = left.expand(full), right.expand(full)
    for dim in summed:
        if left.stride(dim) == 0 and right.stride(dim) != 0:
            right = semantics.reduce(right, [dim], keepdim=True).expand(full)
        elif right.stride(dim) == 0 and left.stride(dim) != 0:
            left = semantics.reduce(left, [dim], keepdim=True).expand(full)
    return semantics.reduce(times(semantics, left, right), summed)


def products(semantics: Semantics, left: Value, right: Value, dims: Sequence[int]) -> Tensor:
    """``sum over dims of left * right``: a parameter is an edge, the second one of two."""
    if isinstance(right, Weight):
        left, right = right, semantics.activation(left)
    if isinstance(left, Weight):
        return edges(semantics, left, right, dims)
    return contract_ids(semantics, left, right, dims)


@rule("aten.linear", **BILINEAR, bias=2)
def linear(semantics: Semantics, x: Value, weight: Value, bias: Value | None = None) -> Tensor:
    """``y[..., o] = sum_i W[o, i] x[..., i] + b[o]``; a computed weight counts as an activation."""
    turned = semantics.moved(lambda t: t.mT, weight) if len(weight.shape) > 1 else weight
    out = matmul(semantics, x, turned)
    return out if bias is None else semantics.join(out, bias)


@rule("aten.addmm", "aten.addmv", "aten.baddbmm", "aten._sparse_addmm", **BILINEAR, bias=0)
def addmm(semantics: Semantics, bias: Value, x: Value, weight: Value, **kwargs: Any) -> Tensor:
    """``b + x W`` with ``W`` of shape (in, out)."""
    out = matmul(semantics, x, weight)
    return out if kwargs.get("beta") == 0 else semantics.join(bias, out).expand(out.shape)


@rule("aten.mm", "aten.matmul", "aten.bmm", "aten.mv", "aten.dot", "aten._sparse_mm", **BILINEAR)
def matmul(semantics: Semantics, x: Value, y: Value) -> Tensor:
    """A product of matrices or vectors, each a parameter or an activation."""
    if len(y.shape) == 1:
        return products(semantics, semantics.activation(x), y, [-1])
    if len(x.shape) == 1:
        return products(semantics, x, semantics.moved(lambda t: t.mT, y), [-1])
    # (ids that are known to be equal are found by their layout)
    left = x if isinstance(x, Weight) else semantics.activation(x)
    left = semantics.moved(lambda t: t.unsqueeze(-1), left)
    return products(semantics, left, semantics.moved(lambda t: t.unsqueeze(-3), y), [-2])


@rule("aten._trilinear", kind="contraction", degree=(1, 1, 1), linear="each", coefficients="one")
def trilinear(
    semantics: Semantics, x: Value, y: Value, z: Value, first: Sequence[int], second: Sequence[int],
    third: Sequence[int], summed: Sequence[int], *args: Any,
) -> Tensor:  # fmt: skip
    """``sum x y z`` over dimensions, with new ones in each operand."""

    def wide(value: Value, dims: Sequence[int]) -> Value:
        for dim in sorted(dims):
            value = semantics.moved(lambda t, dim=dim: t.unsqueeze(dim), value)  # type: ignore[misc]
        return value

    one, other = semantics.activation(wide(x, first)), semantics.activation(wide(z, third))
    return products(semantics, wide(y, second), times(semantics, one, other), summed)


def _spelled(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of all operands and of the result, with letters in place of dots."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    widths = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True)]
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    dots = "".join(spare[: max(widths)])
    terms = [t.replace("...", dots[len(dots) - n :]) for t, n in zip(terms, widths, strict=True)]
    if not arrow:
        every = "".join(terms)
        output = "..." + "".join(sorted(a for a in set(every) - set(dots) if every.count(a) == 1))
    return terms, output.replace("...", dots)


@rule("aten.einsum", kind="contraction", linear="each", coefficients="one")
def einsum(semantics: Semantics, equation: str, operands: Sequence[Value], **kwargs: Any) -> Tensor:
    """Sums of products by index letters, one operand after the other."""
    terms, output = _spelled(equation, [len(operand.shape) for operand in operands])
    if any(len(set(term)) < len(term) for term in terms):
        # (torch's steps are read)
        raise ValueError("an equation with a diagonal")
    letters, value = terms[0], operands[0]
    if len(operands) == 1:
        value = semantics.reduce(value, [i for i, a in enumerate(letters) if a not in output])
        letters = "".join(letter for letter in letters if letter in output)
    for position, (term, other) in enumerate(zip(terms[1:], operands[1:], strict=True), start=2):
        later = set(output).union(*terms[position:])
        every = list(dict.fromkeys(letters + term))
        left, right = (
            _aligned(semantics, operand, names, every)
            for names, operand in ((letters, value), (term, other))
        )
        lost = [i for i, letter in enumerate(every) if letter not in later]
        value = products(semantics, left, right, lost)
        letters = "".join(letter for letter in every if letter in later)
    return semantics.activation(value).permute([letters.index(letter) for letter in output])


def _aligned(semantics: Semantics, operand: Value, names: str, every: Sequence[str]) -> Value:
    """An operand with one dimension for each letter."""
    order = [names.index(letter) for letter in every if letter in names]
    wide = tuple(slice(None) if letter in names else None for letter in every)
    return semantics.moved(lambda t: t.permute(order)[wide], operand)


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
            along(lambda t: t.repeat_interleave(q.shape[-3] // k.shape[-3], -3), [-3], entry)
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
