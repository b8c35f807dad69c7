"""One run of a captured graph on random inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..capture.captured import Captured
from ..models.modes import LOWER
from ..models.values import has_values
from .registry import facts_of, operation_name

# kinds of operations that do not change values
MOVES = ("copy", "movement", "part", "split", "repetition")


def graph_values(
    captured: Captured,
    change: Callable[[str, Tensor], Tensor],
    part: Callable[[Any], Any] = lambda value: value,
) -> list[Any] | None:
    """Values of placeholders: random inputs, tensors of the model; ``None`` if it has no values."""
    values, generator = list[Any](), torch.Generator().manual_seed(0)
    held: dict[str, Mapping[str, Tensor]] = {
        "parameter": captured.parameters,
        "buffer": captured.buffers,
    }
    # (inputs of a capture on the meta device do not say where the model is)
    kept = (*captured.parameters.values(), *captured.buffers.values())
    home = next((tensor.device for tensor in kept if has_values(tensor)), torch.device("cpu"))
    for node in captured.graph.graph.nodes:
        if node.op != "placeholder":
            continue
        kind, name = captured.sources.get(node.name, ("input", node.name))
        own = held.get(kind, {}).get(name, captured.constants.get(node.name))
        if own is None:
            values.append(part(_random(node, generator, home)))
        elif not has_values(own):
            return None
        else:
            # (the graph writes into running statistics)
            own = own.detach() if kind == "parameter" else own.detach().clone()
            values.append(change(name, own))
    return values


def _random(node: fx.Node, generator: torch.Generator, home: torch.device) -> Any:
    shown = node.meta.get("val")
    if not isinstance(shown, Tensor):
        return shown
    shape, place = tuple(shown.shape), home if shown.is_meta else shown.device
    if shown.is_floating_point():
        value = torch.randn(shape, generator=generator)
    elif rows := _rows(node):
        # (random tokens: with equal tokens, no output depends on their order)
        value = torch.randint(rows, shape, generator=generator)
    else:
        value = torch.ones(shape)
    return value.to(place, shown.dtype)


def _rows(tokens: fx.Node) -> int:
    """Rows of the smallest embedding that an input indexes, 0 if it indexes none."""
    found, todo = list[int](), [tokens]
    while todo:
        node = todo.pop()
        for user in node.users:
            if operation_name(user.target) == "aten.embedding":
                table, index = user.all_input_nodes[0], user.args[1]
                found += [table.meta["val"].shape[0]] if index is node else []
            elif facts_of(user).kind in MOVES:
                todo.append(user)
    return min(found, default=0)


def graph_outputs(captured: Captured, found: Any) -> list[Tensor]:
    """The tensors among the results of a graph that the model returns."""
    own = captured.without_updates(pytree.tree_leaves(found))
    return [leaf for leaf in own if isinstance(leaf, Tensor)]


class DoubleRun(fx.Interpreter):
    """Runs a graph in float64 whatever types it names, and without dropout."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One operation."""
        if facts_of(target).kind == "dropout" and isinstance(args[0], Tensor):
            return args[0]
        args, kwargs = pytree.tree_map(
            lambda leaf: torch.float64 if isinstance(leaf, torch.dtype) and leaf in LOWER else leaf,
            (args, kwargs),
        )
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A constant of the graph."""
        return as_float64(super().get_attr(target, args, kwargs))


def as_float64(value: Any) -> Any:
    """Tensors of floating-point numbers in float64, anything else as it is."""
    wide = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if wide else value
