"""Products of groups of rows with one matrix per group: mixtures of experts."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from ..registry import named_arguments, operation_name, rule
from ..semantics import Semantics
from ..values import Value, Weight, shape_of
from .contraction import matmul, with_bias
from .edges import edges


@rule("aten._grouped_mm", "transformers.grouped_mm_fallback", kind="contraction")
def grouped_mm(
    semantics: Semantics,
    x: Value,
    weight: Value,
    offs: Any = None,
    bias: Value | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``y[s] = x[s] W[e(s)]``: data determines the group ``e(s)`` of each row."""
    if offs is None:
        return matmul(semantics, x, weight)
    if len(x.shape) != 2 or len(weight.shape) != 3:
        raise ValueError("groups of columns")
    ids = semantics.activation(x)
    rows = None
    if isinstance(weight, Weight):
        node = semantics.place.node
        rows = semantics.gathered(
            weight, (ids.shape[0],), None if node is None else _chosen_by(node)
        )
    if rows is not None:
        view = rows.moved(lambda t: t.transpose(1, 2), semantics.offsets)
        out = edges(semantics, view, ids.unsqueeze(1), [-1])
    elif isinstance(weight, Weight):
        view = weight.moved(lambda t: t.permute(2, 0, 1).unsqueeze(0), semantics.offsets)
        out = edges(semantics, view, ids[:, None, None, :], [-2, -1])
    else:
        one = semantics.reduce(weight, [0])
        out = matmul(semantics, ids, one)
    return with_bias(semantics, out.expand(shape_of(semantics.place.result)), bias, -1)


def _chosen_by(node: fx.Node) -> fx.Node:
    """The node of the sorted group numbers of the rows, from which the ends
    of the groups are counted.
    """
    ends = node.args[2] if len(node.args) > 2 else node.kwargs["offs"]
    assert isinstance(ends, fx.Node)
    names, at = [], ends
    while len(at.all_input_nodes) == 1 and not _is_sorted(at):
        names.append(operation_name(at.target).removeprefix("aten."))
        at = at.all_input_nodes[0]
    plain = {"to", "_to_copy", "int", "float", "alias", "clone", "contiguous"}
    counted = [name for name in names if name not in plain]
    return (
        at if _is_sorted(at) and counted in (["cumsum", "histc"], ["cumsum", "bincount"]) else ends
    )


def _is_sorted(node: fx.Node) -> bool:
    """Whether the numbers of a node are in ascending order."""
    if (
        node.target is not operator.getitem
        or node.args[1] != 0
        or not isinstance(node.args[0], fx.Node)
    ):
        return False
    source = node.args[0]
    named = named_arguments(source.target, source.args, source.kwargs)
    return operation_name(source.target) == "aten.sort" and not named["descending"]
