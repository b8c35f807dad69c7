"""Decomposition of operations without a rule into operations with one."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..capture.writes import without_writes
from .registry import RULES, operation_name


@cache
def _table() -> dict[Any, Any]:
    """Torch's decompositions of all operations without a rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = torch._decomp.core_aten_decompositions()
        return {op: every[op] for op in every if operation_name(op) not in RULES}


def decomposed(node: fx.Node) -> fx.GraphModule | None:
    """The operation as a graph of smaller ones, with placeholders named like the operands' nodes.

    Args:
        node: a call of an operation, with fake results in ``meta["val"]``.

    Returns:
        The graph, or ``None`` if torch has no decomposition.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    operands = node.all_input_nodes
    shapes = [shape for operand in operands if isinstance(shape := operand.meta.get("val"), Tensor)]
    if not shapes or len(shapes) < len(operands):
        return None
    target: Any = node.target
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        # (values on the meta device stand for the processor's)
        fakes = [
            torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device="cpu" if x.is_meta else x.device
            )
            for x in shapes
        ]

    def function(*tensors: Tensor) -> Any:
        by_node = dict(zip(operands, tensors, strict=True))
        args = fx.node.map_arg(node.args, by_node.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, by_node.__getitem__)
        return target(*args, **kwargs)

    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    try:
        with warnings.catch_warnings(), mode, torch.no_grad():
            warnings.simplefilter("ignore")
            graph = make_fx(function, decomposition_table=_table())(*fakes)
            graph.graph, _ = without_writes(graph.graph)
    except Exception:
        # no decomposition for these operands: the caller pins
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
