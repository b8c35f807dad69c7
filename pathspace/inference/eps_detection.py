"""Questions of rules about the surrounding graph: is a constant an ``eps``,
and can a value be infinite?

A small constant counts as the ``eps`` of a normalisation written out by hand if every use of its
result ends as a divisor, after operations such as roots, powers, movements and sums, and if
dividend and divisor have a common origin.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .registry import facts_of, operation_name

# kinds of operations that do not change elements
MOVEMENTS = frozenset(["copy", "movement", "repetition", "part"])
# further kinds of operations on a divisor, all positively homogeneous
DIVISORS = frozenset(["sum", "total", "mean", "order", "magnitude", "clip", "maximum"])
# largest number of nodes in the search for a common origin of dividend and divisor
NEAR = 64


def guards_a_division(node: fx.Node, sources: Mapping[str, tuple[str, str]]) -> bool:
    """Whether every use of the result of ``node`` divides a value of the same origin.

    Args:
        node: the operation that adds or clamps to a small constant.
        sources: placeholder name -> (kind, name): inputs, which have no scale,
            do not count as an origin.
    """
    if _name(node).endswith("_") and any(
        len(x.users) > 1 or facts_of(x).kind in MOVEMENTS for x in node.all_input_nodes
    ):
        # the in-place operation changes other names of the tensor too
        return False
    origin = _before([node], sources)
    seen: set[tuple[fx.Node, bool]] = set()
    # (a value, whether it is 1 / divisor)
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
    """Whether infinities can reach ``node`` without an overflow: from a quotient, a
    logarithm, or a constant.

    Args:
        node: the operation whose operands are tested.
        sources: placeholder name -> (kind, name): inputs and parameters count
            as finite, buffers do not.
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
        number = any(
            isinstance(arg, float) and math.isinf(arg)
            for arg in (*source.args, *source.kwargs.values())
        )
        known = (
            isinstance(source.target, torch._ops.OpOverload) or source.target is operator.getitem
        )
        if number or not known or facts_of(source).infinite:
            return True
        pending += source.all_input_nodes
    return False


def is_parameter_itself(node: fx.Node, sources: Mapping[str, tuple[str, str]]) -> bool:
    """Whether a value is a parameter, perhaps moved or of another type."""
    while (
        node.op == "call_function"
        and facts_of(node).kind in MOVEMENTS
        and isinstance(node.args[0], fx.Node)
    ):
        node = node.args[0]
    return node.op == "placeholder" and sources.get(node.name, ("", ""))[0] == "parameter"


def _followed(user: fx.Node, value: fx.Node, inverted: bool) -> tuple[bool, bool] | None:
    """The effect of an operation on a divisor.

    Returns:
        Whether it divides its other operands, and whether its result is ``1 / divisor``; ``None``
        for any other operation.
    """
    facts = facts_of(user)
    if facts.kind in MOVEMENTS:
        return False, inverted
    if facts.kind == "power" and user.args[0] is value:
        exponent = user.args[1] if len(user.args) > 1 else facts.degree[0]
        return (False, inverted != (exponent < 0)) if isinstance(exponent, int | float) else None
    if facts.linear == "each" and facts.bias is None:
        return inverted, inverted
    if facts.kind == "quotient" and not user.kwargs:
        if user.args[1] is not value:
            return inverted, inverted
        return (not inverted, not inverted) if user.args[0] is not value else None
    if facts.kind in DIVISORS and not inverted:
        return False, False
    return None


def _before(nodes: list[fx.Node], sources: Mapping[str, tuple[str, str]]) -> set[fx.Node]:
    """Nodes, and the nearest operations and parameters from which they are computed."""
    found: dict[Any, None] = {}
    pending = list(nodes)
    while pending and len(found) < NEAR:
        node = pending.pop(0)
        if node in found or (
            node.op == "placeholder" and sources.get(node.name, ("", ""))[0] == "input"
        ):
            continue
        found[node] = None
        pending += node.all_input_nodes
    return set(found)


def _name(node: fx.Node) -> str:
    return (
        operation_name(node.target).removeprefix("aten.") if node.op == "call_function" else node.op
    )
