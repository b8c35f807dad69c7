"""Linear maps whose weight is a parameter: each scalar weight is an edge."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..registry import rule
from ..semantics import Semantics
from ..values import Value, Weight, broadcast_shape
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


@rule("aten.linear", **BILINEAR, bias=2)
def linear(semantics: Semantics, x: Value, weight: Value, bias: Value | None = None) -> Tensor:
    """``y[..., o] = sum_i W[o, i] x[..., i] + b[o]``; a computed weight counts as an activation."""
    ids = semantics.activation(x)
    if len(weight.shape) == 1:
        out = _vector(semantics, ids, weight)
        return out if bias is None else semantics.join(out, semantics.activation(bias))
    lead = (None,) * (ids.dim() - 1)
    if isinstance(weight, Weight):
        view = weight.moved(lambda t: t[lead], semantics.offsets)
        out = edges(semantics, view, ids.unsqueeze(-2), [-1])
    else:
        out = contract_ids(semantics, weight[lead], ids.unsqueeze(-2), [-1])
    return with_bias(semantics, out, bias, -1)


def _vector(semantics: Semantics, ids: Tensor, vector: Value) -> Tensor:
    if isinstance(vector, Weight):
        return edges(semantics, vector, ids, [-1])
    return contract_ids(semantics, ids, vector, [-1])


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
        return _vector(semantics, semantics.activation(x), y)
    if len(x.shape) == 1:
        ids = semantics.moved(lambda t: t.transpose(-1, -2), y)
        return _vector(semantics, semantics.activation(ids), x)
    if isinstance(y, Weight) and len(y.shape) == 2:
        return linear(
            semantics, semantics.activation(x), y.moved(lambda t: t.t(), semantics.offsets)
        )
    if isinstance(x, Weight) and len(x.shape) == 2:
        return linear(semantics, semantics.activation(y).transpose(-1, -2), x).transpose(-1, -2)
    if isinstance(x, Weight) and isinstance(y, Tensor):
        # a stack of matrices, one for each leading index
        view = x.moved(lambda t: t.unsqueeze(-1), semantics.offsets)
        return edges(semantics, view, y.unsqueeze(-3), [-2])
    left, right = semantics.activation(x).unsqueeze(-1), y
    if isinstance(right, Weight):
        return edges(
            semantics, right.moved(lambda t: t.unsqueeze(-3), semantics.offsets), left, [-2]
        )
    return contract_ids(semantics, left, right.unsqueeze(-3), [-2])


@rule("aten._trilinear", kind="contraction", degree=(1, 1, 1), linear="each", coefficients="one")
def trilinear(
    semantics: Semantics, x: Value, y: Value, z: Value, first: Sequence[int], second: Sequence[int],
    third: Sequence[int], summed: Sequence[int], *args: Any,
) -> Tensor:  # fmt: skip
    """``sum x y z`` over dimensions, with new ones in each operand."""

    def wide(value: Value, dims: Sequence[int]) -> Value:
        def widened(t: Tensor) -> Tensor:
            for dim in sorted(dims):
                t = t.unsqueeze(dim)
            return t

        return semantics.moved(widened, value)

    pair = times(
        semantics, semantics.activation(wide(x, first)), semantics.activation(wide(z, third))
    )
    middle = wide(y, second)
    if isinstance(middle, Weight):
        return edges(semantics, middle, pair, summed)
    return contract_ids(semantics, middle, pair, summed)


# --- einsum


def _spelled(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
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
    values = list(operands)
    for i, term in enumerate(terms):
        for letter in [a for a in dict.fromkeys(term) if term.count(a) > 1]:
            # a diagonal
            while term.count(letter) > 1:
                first, second = term.index(letter), term.rindex(letter)
                values[i] = semantics.moved(
                    lambda t, a=first, b=second: t.diagonal(0, a, b),  # type: ignore[misc]
                    values[i],
                )
                term = term[:second] + term[second + 1 :]
                term = term[:first] + term[first + 1 :] + letter
        terms[i] = term
    return _einsum(semantics, terms, values, output)


def _einsum(
    semantics: Semantics, terms: Sequence[str], operands: Sequence[Value], output: str
) -> Tensor:
    letters, value = terms[0], operands[0]
    if len(operands) == 1:
        lost = [i for i, letter in enumerate(letters) if letter not in output]
        kept = [letter for letter in letters if letter in output]
        return semantics.reduce(value, lost).permute([kept.index(letter) for letter in output])
    for position, (term, other) in enumerate(zip(terms[1:], operands[1:], strict=True), start=2):
        later = set(output).union(*terms[position:])
        every = list(dict.fromkeys(letters + term))
        sides: list[Value] = []
        for names, operand in ((letters, value), (term, other)):
            order = [names.index(letter) for letter in every if letter in names]
            shape = [letter in names for letter in every]

            def align(t: Tensor, order: list[int] = order, shape: list[bool] = shape) -> Tensor:
                t = t.permute(order)
                for dim, present in enumerate(shape):
                    t = t if present else t.unsqueeze(dim)
                return t

            sides.append(
                operand.moved(align, semantics.offsets)
                if isinstance(operand, Weight)
                else align(operand)
            )
        lost = [i for i, letter in enumerate(every) if letter not in later]
        left, right = sides
        if isinstance(left, Weight) and isinstance(right, Weight):
            left = semantics.activation(left)
        if isinstance(left, Weight):
            value = edges(semantics, left, right, lost)
        elif isinstance(right, Weight):
            value = edges(semantics, right, left, lost)
        else:
            value = contract_ids(semantics, left, right, lost)
        letters = "".join(letter for letter in every if letter in later)
    assert isinstance(value, Tensor)
    return value.permute([letters.index(letter) for letter in output])
