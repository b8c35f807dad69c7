"""Which elements constants leave out: those that are multiplied by zero, and those that a
condition does not choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from .folding import FILLED, constant_of
from .registry import operation_name
from .values import distinct, value_of

# products and quotients -> the position of the first factor, and whether the second one divides
FACTORS = {
    f"aten.{name}{end}": place
    for names, place in (("mul multiply", (0, False)), ("div divide true_divide", (0, True)),
                         ("addcmul", (1, False)), ("addcdiv", (1, True)))
    for name in names.split()
    for end in ("", "_")
}  # fmt: skip
CHOICES = frozenset(["aten.where", "aten.masked_fill", "aten.masked_fill_"])


class Constants:
    """The constants of a graph.

    Args:
        module: a captured graph.
        values: placeholder name -> activation, with or without a known value.
    """

    def __init__(self, module: fx.GraphModule, values: Mapping[str, Any]) -> None:
        self.module, self.values = module, values
        self._known: dict[fx.Node, Tensor | None] = {}
        # nodes that depend on nothing else (random numbers turn out to be unknown later)
        self._nodes: set[fx.Node] = set()
        for node in module.graph.nodes:
            given = node.op == "placeholder" and value_of(values.get(node.name)) is not None
            made = node.op == "call_function" and (
                operation_name(node.target) in FILLED
                or self._nodes.issuperset(node.all_input_nodes)
            )
            if given or made or node.op == "get_attr":
                self._nodes.add(node)

    def value(self, node: Any) -> Tensor | None:
        """The value of a node that is a constant, without repetitions along
        its stride-0 dimensions.
        """
        if not isinstance(node, fx.Node) or node not in self._nodes:
            return None
        if node not in self._known:
            known = constant_of(node, self.module, self.values)
            self._known[node] = None if known is None else distinct(known)
        return self._known[node]

    def zeros(self, node: fx.Node) -> bool:
        """Whether an operand of a node is a constant with zeros."""
        found = (self.value(operand) for operand in node.all_input_nodes if operand in self._nodes)
        return any(known is not None and bool((known == 0).any()) for known in found)

    def leaves(self, node: fx.Node) -> list[tuple[Any, Tensor | None]] | None:
        """The operands of a product or a choice with the mask of the
        elements that reach its result.

        Args:
            node: the operation.

        Returns:
            Operand -> mask, which broadcasts to the result, or ``None`` for all elements; or
            ``None`` if no constant leaves anything out.
        """
        name = operation_name(node.target)
        if name in FACTORS and not (set(node.kwargs) - {"value"}):
            first, divides = FACTORS[name]
            x, y = node.args[first : first + 2]
            added = [(operand, None) for operand in node.args[:first]]
            found = [*added, (x, None if divides else self._not_zero(y)), (y, self._not_zero(x))]
        elif name in CHOICES and not node.kwargs and len(node.args) == 3:
            condition, x, y = (
                node.args if name == "aten.where" else (node.args[1], node.args[2], node.args[0])
            )
            known = self.value(condition)
            if known is None:
                return None
            found = [(condition, None), (x, known.bool()), (y, ~known.bool())]
        else:
            return None
        return None if all(mask is None or bool(mask.all()) for _, mask in found) else found

    def _not_zero(self, factor: Any) -> Tensor | None:
        if isinstance(factor, bool | int | float):
            return torch.tensor(factor != 0)
        known = self.value(factor)
        if known is None or not known.numel():
            return None
        kept = known != 0
        # (a zero among many numbers, such as the sine of the first position, is no mask)
        others = known[kept]
        masks = others.numel() < known.numel() and bool((others == others[:1]).all())
        return kept if masks else None
