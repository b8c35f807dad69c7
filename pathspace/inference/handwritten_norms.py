"""A question of rules about the surrounding graph: is a constant an ``eps``?

A small constant counts as the ``eps`` of a normalisation written out by hand if every use of its
result ends as a divisor, after operations such as roots, powers, movements and sums, and if
dividend and divisor have a common origin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from ..capture.captured import named_arguments
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


def is_parameter_itself(node: Any, sources: Mapping[str, tuple[str, str]]) -> bool:
    """Whether a value is a parameter, perhaps moved or of another type."""
    while facts_of(node).kind in MOVEMENTS:
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


# kinds of operations that write numbers, besides those that fill a tensor, and the names of these
WRITERS = frozenset(["choice", "creation", "padding", "write"])
NUMBERS = ("value", "fill_value", "self", "other", "s")
# names of operands that say where values are read or written
PLACES = ("index", "indices", "mask", "condition")
FILLING = ("fill", "full", "index_fill", "scalar_tensor")
MADE = frozenset(
    ["ones", "ones_like", "new_ones", "arange", "eye", "linspace", "logspace", "hann_window"]
)
# largest number of nodes in the search
FARTHEST = 256


def constant_behind(
    node: fx.Node, sources: Mapping[str, tuple[str, str]]
) -> tuple[str, fx.Node | None]:
    """A constant from which operands of ``node`` come, in words, and what writes it."""
    pending, seen = [node], {node}
    while pending and len(seen) < FARTHEST:
        value = pending.pop(0)
        found = _constant(value, sources)
        if found:
            return found, value if value.all_input_nodes else None
        given = named_arguments(value.target, value.args, value.kwargs)
        places = pytree.tree_leaves([given.get(name) for name in PLACES])
        operands = [each for each in value.all_input_nodes if each not in places]
        if value is not node and any(
            sources.get(each.name, ("", ""))[0] == "parameter" for each in operands
        ):
            continue
        facts = facts_of(value)
        # a product has the scale of its other factors
        product = facts.linear == "each" or facts.kind in ("quotient", "power")
        if value is not node and product and len(operands) > 1:
            continue
        for each in operands:
            if each not in seen:
                seen.add(each)
                pending.append(each)
    return "", None


def _constant(node: fx.Node, sources: Mapping[str, tuple[str, str]]) -> str:
    kind = operation_name(node.target).removeprefix("aten.").rstrip("_")
    if node.op == "get_attr" or kind in MADE:
        return "a constant tensor"
    if node.op == "placeholder":
        origin, name = sources.get(node.name, ("", ""))
        return {"constant": "a constant tensor", "buffer": f"the buffer {name}"}.get(origin, "")
    if facts_of(node).kind not in WRITERS and kind not in FILLING:
        return ""
    given = named_arguments(node.target, node.args, node.kwargs)
    for number in map(given.get, NUMBERS):
        if isinstance(number, int | float) and number and math.isfinite(number):
            return f"the constant {number:g}"
    return ""
