"""Sums over paths through operations whose properties in the table determine the result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..capture.captured import Captured
from . import path_sums as sums
from .path_sums import AffineMap, Chosen, OperationCall, Sum, Unknown, is_float, is_number


@dataclass(frozen=True)
class Request:
    """What is asked of a forward pass, and where paths have ended so far (``ends``).

    ``bound``: pass functions by slopes. ``fixed_ends``: end paths where scales are fixed.
    ``apart``: two paths through gain and bias of a frozen normalisation. ``inside``: the part in
    whose results (``exits``, not computed yet) paths end.
    """

    captured: Captured
    p: float
    bound: bool = False
    fixed_ends: bool = False
    exact_norms: bool = False
    apart: bool = False
    inside: set[fx.Node] = field(default_factory=set)
    exits: set[fx.Node] = field(default_factory=set)
    ends: list[Sum] = field(default_factory=list)


class Refused(Exception):
    """Why paths cannot pass an operation."""


def by_facts(call: OperationCall, request: Request) -> Any:
    """The result if properties of the operation determine it, or ``None``."""
    facts, p, shown = call.facts, request.p, call.shown
    if facts.kind == "choice" and call.has(Chosen):
        return _every_path(call, p)
    if facts.kind in ("pick", "write", "part") and call.has(Unknown):
        return None
    if isinstance(shown, Tensor) and not shown.is_floating_point():
        return None
    if facts.kind == "dropout":
        return call.kept(call.args[0]) if facts.degree else None
    if facts.kind == "power":
        return _raised(call, request)
    if facts.kind == "normalisation":
        return _frozen(call, request)
    if facts.linear == "each":
        if request.bound and len(call.entering) > 1:
            raise Refused("a product of activations has no largest slope")
        return sums.multiplied(call, p)
    if facts.elementwise:
        return _elementwise(call, request)
    if facts.moves:
        return sums.moved_sums(call, p, facts.kind in ("padding", "write"))
    linear = facts.linear or facts.separable
    return _weighted(call, p) if linear and isinstance(call.args[0], Sum) else None


def _elementwise(call: OperationCall, request: Request) -> Any:
    facts, args, p = call.facts, call.args, request.p
    quotient = facts.kind == "quotient" and call.kwargs.get("rounding_mode") is None
    if facts.linear == "jointly" or (quotient and not isinstance(args[1], Sum)):
        return AffineMap(call, p).sums()
    if quotient and request.fixed_ends:
        # a division by a sum ends no path at a fixed scale: it divides the scales
        x, over = sums.as_sum(args[0], p), sums.sum_power(args[1], -1)
        return Sum.of(x.values * over.values, x.log + over.log)
    if facts.degree == (1,) and facts.kind != "activation":
        # all paths of the operands pass a maximum
        return _every_path(call, p)
    sloped = facts.kind == "activation" and len(args) == 2 and is_float(args[1])
    return call.kept(_rectified(call, request)) if facts.degree == (1,) or sloped else None


def _rectified(call: OperationCall, request: Request) -> Sum:
    """All paths pass ``max(x, 0) + a min(x, 0)``, and again through a weight ``a``."""
    x, rest = sums.as_sum(call.args[0], request.p), [sums.wide(leaf) for leaf in call.args[1:]]
    weighted = not call.facts.degree
    if not weighted:
        if not request.bound:
            return x
        # (random slopes are kept in an operand)
        ones = torch.ones_like(x.values)
        rest = [ones if isinstance(leaf, Sum | Tensor) else leaf for leaf in rest]
    one, other = (
        _first(call, torch.full_like(x.values, side), rest).abs() ** request.p
        for side in (1.0, -1.0)
    )
    slope = one + other if weighted else torch.maximum(one, other)
    return Sum.of(x.values * slope, x.log)


def _first(call: OperationCall, x: Tensor, rest: Sequence[Any]) -> Tensor:
    """The first result for another first operand."""
    found: Tensor = pytree.tree_leaves(call.run(x, *rest, **call.kwargs))[0]
    return found


def _every_path(call: OperationCall, p: float) -> Sum:
    """All paths of all operands, as of a choice that data make."""
    real = [one for one in call.leaves if isinstance(one, Sum) or is_float(one) or is_number(one)]
    found = sums.added(*(sums.as_sum(one, p) for one in real))
    shapes = [one.shape for one in call.leaves if isinstance(one, Tensor)]
    shape = torch.broadcast_shapes(found.values.shape, *shapes)
    return Sum(found.values.expand(shape), found.log)


def _weighted(call: OperationCall, p: float) -> Any:
    facts, x = call.facts, call.args[0]

    def apply(values: Tensor) -> Tensor:
        return _first(call, values, call.args[1:])

    if facts.coefficients == "positive" and (p == 1 or facts.kind == "mean"):
        mean = apply(x.values)
        share = mean.numel() / max(x.values.numel(), 1)
        return Sum.of(mean * share ** (p - 1), x.log)
    if facts.separable:
        # (the operations are named like ``max_pool2d``)
        rank = int(re.findall(r"(\d)d", call.name)[0])
        batched = x if x.values.dim() == rank + 2 else Sum(x.values[None], x.log)
        found = sums.separated(apply, batched, p, rank)
        return call.kept(found if batched is x else Sum(found.values[0], found.log))
    return AffineMap(call, p).sums()


def _raised(call: OperationCall, request: Request) -> Sum | None:
    x, exponent = call.args[0], (*call.args[1:], *call.facts.degree)[0]
    if not is_number(exponent) or not isinstance(x, Sum):
        return None
    whole = exponent >= 1 and exponent == int(exponent)
    # (the exponents that the rule supports)
    followed = 0 < abs(exponent) <= 8 and float(8 * 3 * 5 * 7 * exponent).is_integer()
    return sums.sum_power(x, exponent) if whole or (request.fixed_ends and followed) else None


def _frozen(call: OperationCall, request: Request) -> Any:
    """A normalisation by running statistics, an affine map per channel, or ``None``."""
    given, x = call.given, call.args[0]
    if given.get("training", False) and not request.fixed_ends:
        raise Refused("batch statistics tie samples; use model.eval()")
    statistics = [given.get(key) for key in ("running_mean", "running_var")]
    own = given.get("use_input_stats", "running_mean" not in given)
    if own or not all(isinstance(each, Tensor) for each in statistics):
        return None
    shape = [n if d == 1 else 1 for d, n in enumerate(x.values.shape)]
    rest = [sums.wide(leaf) for leaf in call.args[1:]]
    shift, end = (_first(call, torch.full(shape, n).double(), rest) for n in (0.0, 1.0))
    parts = [shift]
    if request.apart and isinstance(bias := given.get("bias"), Tensor):
        added = bias.double().reshape(shape)
        parts = [shift - added, added.expand_as(shift)]
    scaled = Sum(x.values * (end - shift).abs() ** request.p, x.log)
    return call.kept(sums.added(scaled, *(Sum(part.abs() ** request.p) for part in parts)))
