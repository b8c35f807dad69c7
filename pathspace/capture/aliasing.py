"""Whether a captured graph that writes into tensors can be read as it is: nothing
else may see what it writes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

_UPDATE_STATISTICS = ("batch_norm", "instance_norm")
# In-place operations that the rules read as they are, where nothing else sees what they write. All
# others are functionalised away first.
_HARMLESS_IN_PLACE = frozenset(
    [
        "relu_",
        "leaky_relu_",
        "prelu_",
        "rrelu_",
        "add_",
        "sub_",
        "div_",
        "dropout_",
        "feature_dropout_",
        "silu_",
        "gelu_",
        "elu_",
        "selu_",
        "celu_",
        "mish_",
        "hardtanh_",
        "hardswish_",
        "hardsigmoid_",
        "sigmoid_",
        "tanh_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "relu6_",
        "neg_",
        "mul_",
        "detach_",
        "requires_grad_",
        "exp_",
        "sqrt_",
        "threshold_",
    ]
)
# operations that return views of an operand, or the operand itself, although torch's
# signatures do not say so
_UNTOLD = frozenset(
    [
        "dropout",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "type_as",
        "sum_to_size",
        "conj_physical",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "broadcast_tensors",
        "meshgrid",
        "lift",
    ]
)
# those that do with a single tensor
_UNTOLD_OF_ONE = frozenset(["einsum", "cartesian_prod", "chain_matmul"])


def writes_are_seen(module: fx.GraphModule) -> bool:
    """Whether a graph, or a region in it, writes into memory that is read under another name later.

    Args:
        module: a captured graph.

    Example:
        >>> import torch
        >>> def forward(x):
        ...     y = x + 1
        ...     y[:, 0].sqrt_()
        ...     return y
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> writes_are_seen(make_fx(forward)(torch.ones(2, 2)))
        True
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    first = _first_names(module.graph)
    # the first name of a node's memory -> all its names
    names: dict[fx.Node, list[fx.Node]] = {}
    written: list[fx.Node] = []
    for node in order:
        names.setdefault(first[node], []).append(node)
        name = _name(node)
        if writes(node) and name not in _UPDATE_STATISTICS:
            if name not in _HARMLESS_IN_PLACE or node.target is torch.ops.aten.mul_.Tensor:
                return True
            written.append(node)
    for node in written:
        after = set()
        for other in names[first[node]]:
            # names that follow from the result have seen what was written
            if other is node or _shares_memory_with(other, first) in after:
                after.add(other)
            elif any(order[user] > order[node] for user in other.users):
                return True
    inner = (part for part in module.children() if isinstance(part, fx.GraphModule))
    return any(writes_are_seen(part) or written_placeholders(part.graph) for part in inner)


def _first_names(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node the first one that has its memory."""
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _shares_memory_with(node, first)
        first[node] = node if source is None else first[source]
    return first


def writes(node: fx.Node) -> bool:
    """Whether an operation writes into its operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def untold(node: fx.Node) -> bool:
    """Whether a node's results may share memory with its operands although its
    signature does not say so.
    """
    name = _name(node)
    return name in _UNTOLD or (name in _UNTOLD_OF_ONE and len(node.all_input_nodes) == 1)


def _shares_memory_with(node: fx.Node, known: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The operand whose memory a node's result may share."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if node.target is operator.getitem:
        operands, number = source.args[:1], node.args[1]
        if untold(source) and isinstance(operands[0], list | tuple) and isinstance(number, int):
            part: Any = operands[0][number]
            return part if isinstance(part, fx.Node) else None
        # a part of what a view consists of; of other results, a tensor of its own
        return source if known[source] is not source else None
    schema = getattr(node.target, "_schema", None)
    shares = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return source if (shares and source is node.args[0]) or untold(node) else None


def written_placeholders(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders into which a graph writes, themselves or views of them."""
    first = _first_names(graph)
    return {first[node] for node in graph.nodes if writes(node) and first[node].op == "placeholder"}
