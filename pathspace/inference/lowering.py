"""Operations that need no rule: constants are computed, operations that torch knows in smaller
ones are decomposed, and operations that contain graphs are interpreted through them.

An operation is run if all of its operands are known. Rules then know which elements an index
selects, which entries a mask removes, and which entries of a tensor are exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..capture.tracer import OPERATION, decompositions, in_smaller_steps
from .registry import RULES, operation_name
from .rules.attention import attention
from .rules.edges import with_others
from .semantics import SHAPES
from .values import Weight, value_of, with_value

LARGEST = 1 << 22
# operations that fill a shape, or that of their operand -> the number, or the position of
# the argument that gives it
FILLED: dict[str, tuple[float | None, int]] = {
    "aten.zeros": (0, 0), "aten.ones": (1, 0), "aten.full": (None, 1),
    "aten.zeros_like": (0, 0), "aten.ones_like": (1, 0), "aten.full_like": (None, 1),
    "aten.new_zeros": (0, 0), "aten.new_ones": (1, 0), "aten.new_full": (None, 2),
}  # fmt: skip


def fold_constant(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on known constants; ``None`` if one is unknown, random or large."""
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
    if not isinstance(target, OPERATION):
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
    """What a graph holds itself: a tensor with a known value, or a region."""
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
    # a step inside must not have the name of an operand, which would be lost
    taken = {operand.name for operand in operands}
    for inner in graph.graph.nodes:
        if inner.op != "placeholder":
            while inner.name in taken:
                inner.name += "_"
            taken.add(inner.name)
    for placeholder, operand in zip(
        (n for n in graph.graph.nodes if n.op == "placeholder"), operands, strict=True
    ):
        placeholder.name = operand.name
    return graph


REGIONS: dict[str, Callable[..., Any]] = {}
Graph = fx.GraphModule


def region(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how a graph in a graph is read, ``function(interpreter, *args, **kwargs)``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        REGIONS.update(dict.fromkeys(names, function))
        return function

    return register


@region("wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "wrap",
        "invoke_subgraph",
        "wrap_activation_checkpoint", "strict_mode", "run_const_graph", "inductor_compiled_code",
        "dynamo_bypassing_wrapper")  # fmt: skip
def once(interpreter: Any, *args: Any, **kwargs: Any) -> Any:
    """A region that is run once."""
    place = next(i for i, arg in enumerate(args) if isinstance(arg, Graph))
    operands = [arg for arg in args[place + 1 :] if not isinstance(arg, str)]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    return interpreter.region(args[place], operands)


def _joined(interpreter: Any, *results: Any) -> Any:
    """A result that is one of several, which therefore share scales."""
    flat, spec = zip(*(pytree.tree_flatten(result) for result in results), strict=True)

    def join(*leaves: Any) -> Any:
        for leaf in leaves:
            if getattr(leaf, "buffer_name", None) is not None:
                interpreter.semantics.read(leaf.buffer_name)
        return (
            interpreter.semantics.join(*leaves)
            if isinstance(leaves[0], Tensor | Weight)
            else leaves[0]
        )

    return pytree.tree_unflatten([join(*leaves) for leaves in zip(*flat, strict=True)], spec[0])


@region("cond")
def branches(
    interpreter: Any, condition: Any, first: Graph, second: Graph, operands: Sequence[Any] = ()
) -> Any:
    """One of two graphs, chosen by data."""
    if isinstance(condition, Tensor | Weight):
        interpreter.semantics.pin(
            [interpreter.semantics.activation(condition)], "a condition compares values"
        )
    return _joined(
        interpreter, *(interpreter.region(graph, list(operands)) for graph in (first, second))
    )


@region("flex_attention")
def flex_attention(interpreter: Any, query: Any, key: Any, value: Any, score: Any, mask: Any,
                   scale: Any, options: Any,
                   score_buffers: Sequence[Any] = (),
                   mask_buffers: Sequence[Any] = ()) -> Any:  # fmt: skip
    """Attention with a user's function of the scores; further tensors that it reads are pinned."""
    semantics = interpreter.semantics
    extra = [
        leaf
        for leaf in pytree.tree_leaves((score_buffers, mask_buffers))
        if isinstance(leaf, Tensor | Weight)
    ]
    semantics.pin([semantics.activation(leaf) for leaf in extra], "attention scores")
    shown = semantics.place.result
    semantics.place.result = shown[0] if isinstance(shown, list | tuple) else shown
    out = attention(semantics, query, key, value, enable_gqa=query.shape[-3] != key.shape[-3])
    semantics.place.result = shown
    return with_others(semantics, out)
