"""A captured graph without regions: operations under ``torch.autocast`` or
``torch.no_grad`` are inlined.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

# Operations that run a graph once in another mode, which does not change
# dependences between values.
_REGIONS = frozenset(["wrap_with_autocast", "wrap_with_set_grad_enabled"])


def _region(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _REGIONS


def inline_regions(module: fx.GraphModule) -> fx.Graph:
    """The graph of a module with all regions of other modes inlined, at any depth.

    Names of placeholders and the ``meta`` of nodes are kept; a graph without
    regions is returned unchanged.

    Args:
        module: a captured graph; it is not changed.

    Example:
        >>> import torch
        >>> from pathspace.capture.capture import capture
        >>> class Net(torch.nn.Module):
        ...     def forward(self, x):
        ...         with torch.autocast("cpu"):
        ...             return x + 1
        >>> graph = capture(Net(), (torch.ones(2),), {}).graph
        >>> calls = lambda g: [node.name for node in g.nodes if node.op == "call_function"]
        >>> [calls(graph.graph), calls(inline_regions(graph))]
        [['add'], ['add']]
    """
    if not any(map(_region, module.graph.nodes)):
        return module.graph
    graph = fx.Graph(module)
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], values.__getitem__))
        elif _region(node):
            at, inner = next(
                (i, getattr(module, str(arg.target)))
                for i, arg in enumerate(node.args)
                if isinstance(arg, fx.Node) and arg.op == "get_attr"
            )
            body = inline_regions(inner)
            places = [place for place in body.nodes if place.op == "placeholder"]
            operands = fx.map_arg(node.args[at + 1 :], values.__getitem__)
            values[node] = graph.graph_copy(body, dict(zip(places, operands, strict=True)))
        elif (
            node.op == "call_function"
            and node.target is operator.getitem
            and isinstance(values.get(node.args[0]), tuple | list)
        ):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    return graph
