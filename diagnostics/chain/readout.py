"""The last layers of a residual branch: parameters in which its direction is linear.

If ``z`` is homogeneous of degree 1 in these parameters together, and the node alone reads it, then
``sum_b <z_b, g_b>`` is ``<W, dLoss/dW>`` summed over them.
"""

from __future__ import annotations

from torch import fx

from pathspace.inference.registry import facts_of

from .dataflow import AFFINE, MOVES, SCALES, Dataflow, is_float_node, kind_of


def readout(graph: Dataflow, start: fx.Node) -> tuple[tuple[str, ...], fx.Node]:
    """Parameters of the branch's last layers, in which z is linear, and the node that
    gives the branch its name.

    Args:
        graph: the captured graph.
        start: the direction z.
    """
    names: list[str] = []
    producer: fx.Node | None = None
    pending, sound = [start], True
    while pending:
        node = pending.pop()
        operation, data = kind_of(node), graph.data_inputs(node)
        direct = _direct(graph, node)
        # another reader adds its gradient to that of the weights
        sound &= graph.read_once(node)
        if operation == "sum" and len(data) == 1 and direct:
            # a separate bias: z is jointly linear in it and in the layer before
            found = direct
            pending += data
        elif (_passes(graph, node) and len(data) == 1) or (operation == "sum" and len(data) == 2):
            found = []
            pending += data
        else:
            found = direct if len(data) == 1 and _scales(graph, node, direct) else []
            sound &= bool(found)
            producer = producer or _named(graph, node)
        sound &= all(len(parameter.users) == 1 for parameter in found)
        names += [graph.captured.sources[parameter.name][1] for parameter in found]
    return (tuple(names) if sound else ()), producer or start


def _direct(graph: Dataflow, node: fx.Node) -> list[fx.Node]:
    """The operands that are parameters themselves."""
    sources = graph.captured.sources
    operands = graph.inputs[graph.index[node]]
    return [a for a in operands if sources.get(a.name, ("", ""))[0] == "parameter"]


def _passes(graph: Dataflow, node: fx.Node) -> bool:
    """Whether an operation is a movement, or multiplies its activation by constants."""
    operation, operands = kind_of(node), graph.inputs[graph.index[node]]
    if operation in SCALES:
        weighs = any(not graph.data(a) and graph.weighs(a) for a in operands)
        return not weighs and not graph.divides(node)
    return operation in MOVES


def _scales(graph: Dataflow, node: fx.Node, direct: list[fx.Node]) -> bool:
    """Whether a layer's output is homogeneous of degree 1 in its own parameters together."""
    kind, facts = kind_of(node), facts_of(node)
    others = [
        a
        for a in graph.inputs[graph.index[node]]
        if is_float_node(a) and not graph.data(a) and a not in direct
    ]
    if kind == "normalisation":
        # (running statistics are constants; the first tensor after the input is the weight)
        tensors = [a for a in node.args[1:] if a is None or isinstance(a, fx.Node)]
        return bool(direct) and tensors[0] in direct and not any(map(graph.weighs, others))
    if kind == "quotient":
        return len(direct) == 1 and node.args[0] is direct[0] and not others
    if kind not in AFFINE or facts.linear != "each" or others:
        return False
    base = node.args[facts.bias] if facts.bias is not None and facts.bias < len(node.args) else None
    return sum(parameter is not base for parameter in direct) == 1


def _named(graph: Dataflow, node: fx.Node) -> fx.Node:
    """The layer that names the branch: that before a layer scale."""
    operation, data = kind_of(node), graph.data_inputs(node)
    while operation in SCALES and len(data) == 1:
        node = data[0]
        operation, data = kind_of(node), graph.data_inputs(node)
        while operation in MOVES and len(data) == 1:
            node = data[0]
            operation, data = kind_of(node), graph.data_inputs(node)
    return node


__all__ = ["readout"]
