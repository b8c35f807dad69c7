"""Computation of constants, so that masks, positions and index tables have values
during the interpretation.

An operation is run if all of its operands are known. Rules then know which elements an index
selects, which entries a mask removes, and which entries of a tensor are exactly zero.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .registry import operation_name
from .semantics import SHAPES
from .values import Weight, distinct, value_of, with_value

LARGEST = 1 << 22
# operations that fill the shape of their operand -> the number, or the position of
# the argument that gives it
FILLED: dict[str, tuple[float | None, int]] = {
    "aten.zeros_like": (0, 0), "aten.ones_like": (1, 0), "aten.full_like": (None, 1),
    "aten.new_zeros": (0, 0), "aten.new_ones": (1, 0), "aten.new_full": (None, 2),
}  # fmt: skip


def fold_constant(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on known constants.

    Args:
        node: the operation.
        args: its operands, activations with or without a known value.
        kwargs: its keyword operands.

    Returns:
        The result as activations with known values, or ``None`` if an operand is unknown, or if the
        result is random or large.
    """
    target, shown = node.target, node.meta.get("val")
    if operation_name(target) in FILLED:
        number, position = FILLED[operation_name(target)]
        number = args[position] if number is None and len(args) > position else number
        plain = (
            _is_number(number)
            and isinstance(shown, Tensor)
            and all(isinstance(n, int) for n in shown.shape)
        )
        return (
            with_value(torch.full((), number, dtype=shown.dtype).expand(shown.shape))  # type: ignore[union-attr, arg-type]
            if plain
            else None
        )
    if not isinstance(target, torch._ops.OpOverload):
        plain = not any(
            isinstance(leaf, Tensor | Weight) for leaf in pytree.tree_leaves((args, kwargs))
        )
        return target(*args, **kwargs) if plain and callable(target) and _is_number(shown) else None
    if (
        operation_name(target) in SHAPES
        and isinstance(shown, Tensor)
        and all(isinstance(n, int) for n in shown.shape)
    ):
        # (only the shape of the second operand counts)
        args = (args[0], with_value(torch.empty(()).expand(shown.shape)))
    # (mostly the first operand decides)
    if any(map(_is_unknown, args)):
        return None
    leaves = pytree.tree_leaves((args, kwargs))
    if any(map(_is_unknown, leaves)):
        return None
    results = [leaf for leaf in pytree.tree_leaves(shown) if isinstance(leaf, Tensor)]
    if not results or any(not all(isinstance(n, int) for n in leaf.shape) for leaf in results):
        return None
    sizes = [leaf.numel() for leaf in (*leaves, *results) if isinstance(leaf, Tensor)]
    tags = target.tags
    if (
        max(sizes) > LARGEST
        or torch.Tag.nondeterministic_seeded in tags
        or "empty" in target._schema.name
    ):
        return None
    try:
        real_args, real_kwargs = pytree.tree_map(_real, (tuple(args), dict(kwargs)))
        computed = target(*real_args, **real_kwargs)
    except Exception:
        # an operation that cannot run here is interpreted by its rule
        return None
    return pytree.tree_map(
        lambda leaf: with_value(leaf) if isinstance(leaf, Tensor) else leaf, computed
    )


def _is_unknown(leaf: Any) -> bool:
    return isinstance(leaf, Weight) or (isinstance(leaf, Tensor) and value_of(leaf) is None)


def _real(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        value = value_of(leaf)
        assert value is not None
        # (a copy, because in-place operations must not change the constants of the graph)
        return value.clone()
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _is_number(shown: Any) -> bool:
    return isinstance(shown, int | float | bool)


def held_by(module: fx.GraphModule, target: str) -> Any:
    """What a graph holds itself: a tensor as an activation with a known
    value, a region as it is.
    """
    value = attrgetter(target)(module)
    return with_value(value) if isinstance(value, Tensor) else value


def constant_of(
    wanted: fx.Node, module: fx.GraphModule, values: Mapping[str, Any]
) -> Tensor | None:
    """The value of a node that depends only on constants.

    Args:
        wanted: a node of the graph.
        module: the graph.
        values: placeholder name -> activation, with or without a known value.

    Returns:
        The value, or ``None`` if the node depends on anything else.
    """
    pending, needed = [wanted], {wanted}
    while pending:
        node = pending.pop()
        if node.op == "placeholder" and value_of(values.get(node.name)) is None:
            return None
        if operation_name(node.target) in FILLED:
            continue
        new = [operand for operand in node.all_input_nodes if operand not in needed]
        pending += new
        needed.update(new)
    known: dict[fx.Node, Any] = {}
    for node in sorted(needed):
        if node.op == "placeholder":
            known[node] = values[node.name]
        elif node.op == "get_attr":
            known[node] = held_by(module, str(node.target))
        elif node.target is operator.getitem:
            known[node] = known[node.args[0]][node.args[1]]  # type: ignore[index]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.get)
            known[node] = fold_constant(node, args, kwargs)
        if known[node] is None:
            return None
    return value_of(known[wanted])


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
