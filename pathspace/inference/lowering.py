"""Operations that need no rule: constants are computed, and operations that torch knows in smaller
ones are decomposed.

An operation is run if all of its operands are known. Rules then know which elements an index
selects, which entries a mask removes, and which entries of a tensor are exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..capture.captured import named_arguments
from ..capture.tracer import OPERATION, decompositions, in_smaller_steps
from .registry import RULES, operation_name
from .semantics import SHAPES
from .values import Weight, value_of, with_value

LARGEST = 1 << 22


def fold_constant(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on known constants; ``None`` if one is unknown, random or large."""
    target, shown = node.target, node.meta.get("val")
    own = operation_name(target).removeprefix("aten.").removeprefix("new_").removesuffix("_like")
    if own in ("zeros", "ones", "full"):
        number = named_arguments(target, args, kwargs).get("fill_value", int(own == "ones"))
        if not (_is_number(number) and _has_sizes(shown)):
            return None
        return with_value(torch.full((), number, dtype=shown.dtype).expand(shown.shape))
    if not isinstance(target, OPERATION):
        plain = not any(
            isinstance(leaf, Tensor | Weight) for leaf in pytree.tree_leaves((args, kwargs))
        )
        return target(*args, **kwargs) if plain and callable(target) and _is_number(shown) else None
    if operation_name(target) in SHAPES and _has_sizes(shown):
        # (only the shape of the second operand counts)
        args = (args[0], with_value(torch.empty(()).expand(shown.shape)))
    # (mostly the first operand decides)
    if any(map(_is_unknown, args)):
        return None
    leaves = pytree.tree_leaves((args, kwargs))
    if any(map(_is_unknown, leaves)):
        return None
    results = [leaf for leaf in pytree.tree_leaves(shown) if isinstance(leaf, Tensor)]
    if not results or not all(map(_has_sizes, results)):
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


def _has_sizes(shown: Any) -> TypeGuard[Tensor]:
    return isinstance(shown, Tensor) and all(isinstance(size, int) for size in shown.shape)


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
    """What a graph holds itself: a tensor with a known value, or another graph."""
    value = attrgetter(target)(module)
    return with_value(value) if isinstance(value, Tensor) else value


@cache
def _table() -> dict[Any, Any]:
    every = decompositions()
    return {op: every[op] for op in every if operation_name(op) not in RULES}


def decomposed(node: fx.Node) -> fx.GraphModule | None:
    """The operation in smaller ones, with placeholders named like its operands; or ``None``."""
    if not isinstance(node.target, OPERATION):
        return None
    operands = node.all_input_nodes
    shapes = [shape for operand in operands if isinstance(shape := operand.meta.get("val"), Tensor)]
    if not shapes or len(shapes) < len(operands):
        return None
    target: Any = node.target

    def function(*tensors: Tensor) -> Any:
        by_node = dict(zip(operands, tensors, strict=True))
        args = fx.node.map_arg(node.args, by_node.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, by_node.__getitem__)
        return target(*args, **kwargs)

    graph = in_smaller_steps(function, shapes, _table())
    if graph is None:
        return None
    calls = [inner for inner in graph.graph.nodes if inner.op == "call_function"]
    if any(operation_name(inner.target) == operation_name(target) for inner in calls):
        return None
    for number, inner in enumerate(graph.graph.nodes):
        # (no step inside may have the name of an operand, which would be lost)
        inner.name = f"{node.name} {number}"
    places = graph.graph.find_nodes(op="placeholder")
    for place, operand in zip(places, operands, strict=True):
        place.name = operand.name
    return graph
