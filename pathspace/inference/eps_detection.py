"""A question of rules about the surrounding graph: is a constant an ``eps``?

A small constant counts as the ``eps`` of a normalisation written out by hand if every use of its
result ends as a divisor, after operations such as roots, powers, movements and sums, and if
dividend and divisor have a common origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from .registry import facts_of, operation_name

# kinds of operations that do not change elements
MOVEMENTS = frozenset(["copy", "movement", "repetition", "part"])
# further kinds of operations on a divisor, all positively homogeneous
DIVISORS = frozenset(["sum", "total", "mean", "order", "magnitude", "clip", "maximum"])
# largest number of nodes in the search for a common origin of dividend and divisor
NEAR = 64


def guards_a_division(node: fx.Node, sources: Mapping[str, tuple[str, str]]) -> bool:
    """Whether every use of the result of ``node`` divides a value of the same origin."""
    if operation_name(node.target).endswith("_") and any(
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
    """Whether it divides others, and whether it makes ``1 / divisor``; else ``None``."""
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
