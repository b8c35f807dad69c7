"""A question of rules about the surrounding graph: is a constant an ``eps``?

A small constant counts as the ``eps`` of a normalisation written out by hand if every use of its
result ends as a divisor, after operations such as roots, powers, movements and sums, and if
dividend and divisor have a common origin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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


# operation -> positions of the numbers that it writes
NUMBERS: Mapping[str, tuple[int, ...]] = {
    "masked_fill": (2,), "where": (1, 2), "full": (1,), "full_like": (1,), "new_full": (2,),
    "scalar_tensor": (0,),
    "fill": (1,), "index_fill": (3,), "scatter": (3,), "pad": (3,), "constant_pad_nd": (2,),
}  # fmt: skip
# operation -> positions of the operands whose values it passes on, if not all
CARRIED: Mapping[str, tuple[int, ...]] = {
    "where": (1, 2), "masked_fill": (0, 2), "index": (0,), "gather": (0,), "index_select": (0,),
    "scatter": (0, 3),
    "take_along_dim": (0,), "index_put": (0, 2), "index_fill": (0, 3), "masked_select": (0,),
}  # fmt: skip
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
        kind = (
            operation_name(value.target).removeprefix("aten.").rstrip("_")
            if value.op == "call_function"
            else ""
        )
        found = _constant(value, kind, sources)
        if found:
            return found, value if value.all_input_nodes else None
        operands = list(_operands(value, kind))
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


def _operands(node: fx.Node, kind: str) -> Iterator[fx.Node]:
    if kind not in CARRIED:
        yield from node.all_input_nodes
        return
    for place in CARRIED[kind]:
        if place < len(node.args) and isinstance(node.args[place], fx.Node):
            yield node.args[place]  # type: ignore[misc]


def _constant(node: fx.Node, kind: str, sources: Mapping[str, tuple[str, str]]) -> str:
    if node.op == "get_attr" or kind in MADE:
        return "a constant tensor"
    if node.op == "placeholder":
        origin, name = sources.get(node.name, ("", ""))
        return {"constant": "a constant tensor", "buffer": f"the buffer {name}"}.get(origin, "")
    numbers: list[Any] = [
        node.args[place] for place in NUMBERS.get(kind, ()) if place < len(node.args)
    ]
    numbers += [node.kwargs.get(name) for name in ("fill_value", "value")]
    for number in numbers:
        if isinstance(number, int | float) and number and math.isfinite(number):
            return f"the constant {number:g}"
    return ""
