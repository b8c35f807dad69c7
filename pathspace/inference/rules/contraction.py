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


def with_bias(semantics: Semantics, out: Tensor, bias: Value | None, dim: int) -> Tensor:
    """Add a bias along one dimension."""
    if bias is None:
        return out
    shape = [1] * out.dim()
    shape[dim] = -1
    return semantics.join(out, semantics.activation(bias).reshape(shape))


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


def products(semantics: Semantics, factor: Value, value: Tensor, dims: Sequence[int]) -> Tensor:
    """``sum over dims of factor * value``: a parameter is an edge."""
    if isinstance(factor, Weight):
        return edges(semantics, factor, value, dims)
    return contract_ids(semantics, factor, value, dims)


@rule("aten.linear", **BILINEAR, bias=2)
def linear(semantics: Semantics, x: Value, weight: Value, bias: Value | None = None) -> Tensor:
    """``y[..., o] = sum_i W[o, i] x[..., i] + b[o]``; a computed weight counts as an activation."""
    ids = semantics.activation(x)
    if len(weight.shape) == 1:
        out = products(semantics, weight, ids, [-1])
        return out if bias is None else semantics.join(out, semantics.activation(bias))
    lead = (None,) * (ids.dim() - 1)
    view = semantics.moved(lambda t: t[lead], weight)
    return with_bias(semantics, products(semantics, view, ids.unsqueeze(-2), [-1]), bias, -1)


@rule("aten.addmm", "aten.addmv", "aten.baddbmm", "aten._sparse_addmm", **BILINEAR, bias=0)
def addmm(semantics: Semantics, bias: Value, x: Value, weight: Value, **kwargs: Any) -> Tensor:
    """``b + x W`` with ``W`` of shape (in, out)."""
    product = matmul(semantics, x, weight)
    return (
        product if kwargs.get("beta") == 0 else semantics.join(bias, product).expand(product.shape)
    )


@rule("aten.mm", "aten.matmul", "aten.bmm", "aten.mv", "aten.dot", "aten._sparse_mm", **BILINEAR)
def matmul(semantics: Semantics, x: Value, y: Value) -> Tensor:
    """A product of matrices or vectors, each a parameter or an activation."""
    if len(y.shape) == 1:
        return products(semantics, y, semantics.activation(x), [-1])
    if len(x.shape) == 1:
        ids = semantics.moved(lambda t: t.transpose(-1, -2), y)
        return products(semantics, x, semantics.activation(ids), [-1])
    # (ids that are known to be equal are found by their layout)
    left = x if isinstance(x, Weight) else semantics.activation(x)
    left = semantics.moved(lambda t: t.unsqueeze(-1), left)
    right = semantics.moved(lambda t: t.unsqueeze(-3), y)
    if isinstance(right, Tensor):
        return products(semantics, left, right, [-2])
    return products(semantics, right, semantics.activation(left), [-2])


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
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    widest = max(
        (r - len(t.replace("...", "")) for t, r in zip(terms, ranks, strict=True) if "..." in t),
        default=0,
    )
    dots = "".join(spare[:widest])

    def write_out(term: str, rank: int) -> str:
        width = rank - len(term.replace("...", ""))
        return term.replace("...", dots[len(dots) - width :])

    terms = [write_out(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    if not arrow:
        plain = "".join(terms)
        output = dots + "".join(
            sorted(letter for letter in set(plain) - set(dots) if plain.count(letter) == 1)
        )
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
        if isinstance(right, Weight):
            left, right = right, left
        value = products(semantics, left, semantics.activation(right), lost)
        letters = "".join(letter for letter in every if letter in later)
    return semantics.activation(value).permute([letters.index(letter) for letter in output])


def _aligned(semantics: Semantics, operand: Value, names: str, every: Sequence[str]) -> Value:
    """An operand with one dimension for each letter."""
    order = [names.index(letter) for letter in every if letter in names]

    def align(t: Tensor) -> Tensor:
        t = t.permute(order)
        for dim, letter in enumerate(every):
            t = t if letter in names else t.unsqueeze(dim)
        return t

    return semantics.moved(align, operand)


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
