"""What a rule has to know of the graph around it: does a small constant guard a division, may a value be infinite?

Is a small constant the ``eps`` of a normalisation written out by hand? A look ahead in the graph.

It is if all that is made of it ends as a divisor, by way of operations that keep it one (roots, powers, movements,
sums), of something that comes from where the divisor comes from. Everywhere else it is a constant like any other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from pathspace.inference.registry import operation_name

MOVEMENTS = frozenset(
    ["view", "reshape", "_unsafe_view", "view_as", "reshape_as", "expand", "expand_as", "broadcast_to", "unsqueeze",
     "squeeze", "transpose", "permute", "movedim", "swapaxes", "t", "contiguous", "clone", "to", "_to_copy", "type_as",
     "alias", "detach", "repeat", "flatten", "unflatten", "select", "slice"]
)  # fmt: skip
# what a divisor may go through besides: it stays positively homogeneous
DIVISORS = frozenset(
    ["add", "sub", "sum", "mean", "amax", "amin", "abs", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"]
)
PRODUCTS = frozenset(["mul", "multiply", "bmm", "mm", "matmul", "einsum"])
QUOTIENTS = frozenset(["div", "divide", "true_divide"])
# finite operands may give infinite results
UNBOUNDED = QUOTIENTS | frozenset(
    ["reciprocal", "rsqrt", "pow", "float_power", "addcdiv", "log", "log2", "log10", "log1p", "logit", "tan", "xlogy",
     "exp", "exp2", "expm1", "cosh", "sinh", "atanh", "erfinv", "lgamma", "digamma", "polygamma", "linalg_inv",
     "inverse", "logsumexp", "logcumsumexp", "linalg_solve", "linalg_vector_norm", "norm", "prod", "cumprod"]
)  # fmt: skip
# how many operations back a numerator and its divisor may have their common origin
NEAR = 64


def guards_a_division(node: fx.Node, sources: Mapping[str, tuple[str, str]]) -> bool:
    """Whether everything made of the result of ``node`` divides something of the same origin.

    Args:
        node: the operation that adds or clamps to a small constant.
        sources: placeholder name -> (kind, name): inputs, which have no scale, do not count as an origin.
    """
    if _name(node).endswith("_") and any(len(x.users) > 1 or _kind(x) in MOVEMENTS for x in node.all_input_nodes):
        # other names of the tensor would see the constant, too
        return False
    origin = _before([node], sources)
    seen: set[tuple[fx.Node, bool]] = set()
    # (a value, whether it is 1 / divisor by now)
    pending = [(node, False)]
    while pending:
        value, inverted = pending.pop()
        if (value, inverted) in seen:
            continue
        seen.add((value, inverted))
        for user in value.users:
            following = _followed(user, value, inverted)
            if following is None:
                return False
            divides, after = following
            others = [other for other in user.all_input_nodes if other is not value]
            if not (divides and origin & _before(others, sources)):
                pending.append((user, after))
    return True


def may_be_infinite(node: fx.Node, sources: Mapping[str, tuple[str, str]]) -> bool:
    """Whether infinities may reach ``node`` other than by overflow: from a quotient, a logarithm, or a constant.

    Args:
        node: the operation whose operands are in question.
        sources: placeholder name -> (kind, name): inputs and parameters count as finite, buffers do not.
    """
    pending, seen = list(node.all_input_nodes), set[fx.Node]()
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.op == "placeholder":
            if sources.get(source.name, ("", ""))[0] not in ("input", "parameter"):
                return True
            continue
        number = any(isinstance(arg, float) and math.isinf(arg) for arg in (*source.args, *source.kwargs.values()))
        known = isinstance(source.target, torch._ops.OpOverload) or source.target is operator.getitem
        if number or not known or _kind(source) in UNBOUNDED:
            return True
        pending += source.all_input_nodes
    return False


def is_parameter_itself(node: fx.Node, sources: Mapping[str, tuple[str, str]]) -> bool:
    """Whether a value is a parameter as it is, or a movement or another type of it."""
    while node.op == "call_function" and _name(node) in MOVEMENTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "placeholder" and sources.get(node.name, ("", ""))[0] == "parameter"


def _followed(user: fx.Node, value: fx.Node, inverted: bool) -> tuple[bool, bool] | None:
    """What an operation makes of a divisor.

    Returns:
        Whether its other operands are divided, and whether its result is ``1 / divisor``; ``None`` for an operation
        that does something else.
    """
    kind = _kind(user)
    if kind in MOVEMENTS or kind in ("sqrt", "square"):
        return False, inverted
    if kind in ("rsqrt", "reciprocal"):
        return False, not inverted
    if kind == "pow" and user.args[0] is value and isinstance(user.args[1], int | float):
        return False, inverted != (user.args[1] < 0)
    if kind in PRODUCTS:
        return inverted, inverted
    if kind in QUOTIENTS and not user.kwargs:
        if user.args[1] is not value:
            return inverted, inverted
        return (not inverted, not inverted) if user.args[0] is not value else None
    if kind in DIVISORS and not inverted:
        return False, False
    return None


def _before(nodes: list[fx.Node], sources: Mapping[str, tuple[str, str]]) -> set[fx.Node]:
    """Nodes and the nearest operations and parameters that they come from."""
    found: dict[Any, None] = {}
    pending = list(nodes)
    while pending and len(found) < NEAR:
        node = pending.pop(0)
        if node in found or (node.op == "placeholder" and sources.get(node.name, ("", ""))[0] == "input"):
            continue
        found[node] = None
        pending += node.all_input_nodes
    return set(found)


def _name(node: fx.Node) -> str:
    return operation_name(node.target).removeprefix("aten.") if node.op == "call_function" else node.op


def _kind(node: fx.Node) -> str:
    name = _name(node)
    return name if name.startswith("_") else name.rstrip("_")


__all__ = ["guards_a_division", "is_parameter_itself", "may_be_infinite"]
