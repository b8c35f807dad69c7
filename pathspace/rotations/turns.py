"""Turns of pairs of features: pieces of one tensor, put together in another order.

The half-turn of a rotary embedding, ``cat(-x[d/2:], x[:d/2])``, is a matrix ``P`` with
``P^2 = -1``; matrices that commute with it are complex linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..capture.captured import named_arguments
from ..inference.registry import facts_of, operation_name
from ..inference.sides import varying
from ..inference.values import shape_of
from .coordinates import is_coordinate
from .layouts import narrowed


def turned(
    node: fx.Node, result: Tensor, seen: Mapping[fx.Node, Any]
) -> tuple[Tensor, np.ndarray | None] | None:
    """The coordinates of a tensor whose two pieces a concatenation puts together, and rows of
    (coordinate, the coordinate in its place, sign); no rows if all are in their places.

    Args:
        node: a concatenation.
        result: the coordinates of its result.
        seen: node -> coordinates.
    """
    pieces: Any = node.args[0]
    if not isinstance(pieces, list | tuple) or len(pieces) != 2:
        return None
    (first, one), (second, other) = map(_source_of, pieces)
    source = None if first is None or first is not second else seen.get(first)
    if not isinstance(source, Tensor) or source.shape != result.shape:
        return None
    signs = [
        torch.full(shape_of(piece.meta["val"]), sign)
        for piece, sign in zip(pieces, (one, other), strict=True)
    ]
    joined = node.target(signs, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    along = varying(source) | varying(result)
    rows = torch.stack([narrowed(part, along).reshape(-1) for part in (source, result, joined)])
    if not bool(is_coordinate(rows[:2]).all()):
        return None
    rows = torch.unique(rows, dim=1)
    if len(torch.unique(rows[0])) != rows.shape[1]:
        return None
    same = bool((rows[0] == rows[1]).all()) and len(torch.unique(rows[2])) == 1
    return source, None if same else rows.numpy()


def pieces_of(node: fx.Node) -> Tensor:
    """The number of the operand that each element of a concatenation, or of a write, is from."""
    numbers = {
        operand: torch.full(shape_of(operand.meta["val"]), number)
        for number, operand in enumerate(node.all_input_nodes)
    }
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
    made: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return made


def _source_of(node: fx.Node) -> tuple[fx.Node | None, int]:
    """The tensor of which a node is a part along one dimension, and a sign."""
    sign = 1
    while (name := operation_name(node.target)) == "aten.neg" or facts_of(node).kind == "copy":
        sign = -sign if name == "aten.neg" else sign
        node = node.all_input_nodes[0]
    if name == "getitem":
        node = node.all_input_nodes[0]
    along = "dim" in named_arguments(node.target, node.args, node.kwargs)
    whole = facts_of(node).kind not in ("part", "split") or not along
    return (None if whole else node.all_input_nodes[0]), sign
