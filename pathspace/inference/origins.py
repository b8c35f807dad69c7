"""The origin of a fixed scale: search for a constant from which the operands of
an operation are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from .registry import facts_of, operation_name

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
NEAR = 256


def constant_behind(node: fx.Node, sources: Mapping[str, tuple[str, str]]) -> str:
    """A constant from which the operands of ``node`` are computed by operations without parameters.

    Args:
        node: an operation.
        sources: placeholder name -> (kind, name).

    Returns:
        ``"the constant 1e-05"``, ``"a constant tensor"``, ``"the buffer mask"``, or
        ``""`` if there is none.
    """
    pending, seen = [node], {node}
    while pending and len(seen) < NEAR:
        value = pending.pop(0)
        kind = (
            operation_name(value.target).removeprefix("aten.").rstrip("_")
            if value.op == "call_function"
            else ""
        )
        found = _constant(value, kind, sources)
        if found:
            return found
        operands = list(_operands(value, kind))
        if value is not node and any(
            sources.get(each.name, ("", ""))[0] == "parameter" for each in operands
        ):
            continue
        facts = facts_of(value)
        # a product has the scale of its other factors
        if (facts.linear == "each" or facts.kind in ("quotient", "power")) and len(operands) > 1:
            continue
        for each in operands:
            if each not in seen:
                seen.add(each)
                pending.append(each)
    return ""


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
