"""What a capture cannot show at its sizes: parts that are empty, tables that are read in whole,
means over one element, numbers that are alike only because sizes are small.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..inference.lowering import fold_constant
from ..inference.registry import facts_of, operation_name
from ..inference.values import value_of, with_value
from ..models.values import has_values, with_numbers
from .aliasing import writes
from .captured import Captured, place

# operation -> position of its dimension argument
APART = {
    "select": 1,
    "unbind": 1,
    "squeeze": 1,
    "split": 2,
    "chunk": 2,
    "split_with_sizes": 2,
    "tensor_split": 2,
}
PARTS = frozenset(["slice", "select", "narrow"])
# reductions whose second argument gives the dimensions
REDUCED = frozenset(
    [
        *("mean", "sum", "amax", "amin", "max", "min", "prod", "logsumexp", "std", "var"),
        *("median", "nanmean", "nansum", "linalg_vector_norm", "argmax", "argmin", "cumsum"),
    ]
)
# operations that select rows of a table -> positions of the table and of the index
LOOKUPS = {"embedding": (0, 1), "index_select": (0, 2), "index": (0, 1)}
# operations after which different numbers may be the same
STEPS = frozenset(
    [
        *("ge", "gt", "le", "lt", "eq", "ne", "isin", "bucketize", "searchsorted"),
        *("floor_divide", "div", "floor", "trunc", "round", "ceil", "clamp", "clamp_min"),
        *("clamp_max", "clip", "relu", "sign", "minimum", "maximum", "remainder", "fmod", "where"),
        *("tril", "triu", "to", "bitwise_right_shift", "__rshift__"),
    ]
)
# elements of the operands and of the result of what is computed here
LARGEST = 1 << 20


def short_name(node: fx.Node) -> str:
    """The name of an operation without ``aten.``."""
    return operation_name(node.target).removeprefix("aten.")


class _Looker:
    """Looks at the operations of one capture, and computes what does not depend on data."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.held: dict[fx.Node, Tensor] = {}
        # what may depend on sizes; views of buffers, and of parameters
        self.sized: set[fx.Node] = set()
        self.parts: set[fx.Node] = set()
        self.tables: set[fx.Node] = set()
        self.flat: list[fx.Node] = []
        self.beyond = False

    def look(self) -> dict[fx.Node, str]:
        """Operation -> what it hides."""
        found: dict[fx.Node, str] = {}
        for node in self.captured.graph.graph.nodes:
            if node.op == "placeholder":
                self._given(node)
            elif node.op == "call_function" and (reason := self._reason(node)):
                found[node] = reason
        # (a mask that is part of another mask has no effect of its own)
        seen = [
            node
            for node in self.flat
            if any(user not in self.held or _is_flat(self.held[user]) for user in node.users)
        ]
        return found | dict.fromkeys(seen, "flat")

    def _given(self, node: fx.Node) -> None:
        kind, name = self.captured.sources.get(node.name, ("", ""))
        if kind == "parameter":
            self.tables.add(node)
        value = self.captured.buffers.get(name) if kind == "buffer" else None
        if value is not None and value.layout == torch.strided and has_values(value):
            self.held[node] = value.detach()
            self.parts.add(node)

    def _reason(self, node: fx.Node) -> str:
        """What an operation hides, ``""`` for nothing."""
        shown, name = node.meta.get("val"), short_name(node)
        # (a size that data decide is no number)
        if isinstance(shown, Tensor) and any(type(n) is int and not n for n in shown.shape):
            return "empty"
        if isinstance(shown, list | tuple) and len(shown) == 1 and name in APART:
            return "alone"
        if _reduces_one(node):
            return "one"
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if self._reads_all(node, first):
            return "whole"
        # (a buffer as it is has the same size at all sizes)
        made = not node.all_input_nodes or (first in self.parts and name in PARTS)
        if not made and self.sized.isdisjoint(node.all_input_nodes):
            return ""
        value = _computed(node, self.held)
        if value is None:
            return ""
        self.held[node] = value
        self.sized.add(node)
        if first is None:
            return ""
        if first in self.parts and name in PARTS:
            self.parts.add(node)
            if not bool(value.any()) and bool(self.held[first].any()):
                return "zeros"
        if first in self.sized and name in STEPS:
            self.flat += [node] if _is_flat_here(node, self.held[first], value) else []
        return ""

    def _reads_all(self, node: fx.Node, first: fx.Node | None) -> bool:
        """Whether an operation selects all rows of a parameter, as many as there happen to be."""
        name, shown = short_name(node), node.meta.get("val")
        if name == "slice" and first in self.tables and isinstance(shown, Tensor):
            self.tables.add(node)
            ends = [arg for arg in node.args[2:4] if isinstance(arg, int)]
            written = any(abs(end) < sys.maxsize and end for end in ends)
            known = _sizes(first)
            return written and known is not None and _sizes(node) == known
        if name not in LOOKUPS:
            return False
        table, index = (node.args[at] if len(node.args) > at else None for at in LOOKUPS[name])
        if isinstance(index, list | tuple):
            index = index[0] if len(index) == 1 else None
        if not isinstance(index, fx.Node) or index not in self.held:
            return False
        if not isinstance(table, fx.Node) or not isinstance(table.meta.get("val"), Tensor):
            return False
        positions, sizes = self.held[index], _sizes(table)
        if positions.dtype == torch.bool or not positions.numel() or not sizes:
            return False
        dim: Any = node.args[1] if name == "index_select" else 0
        rows = sizes[dim]
        self.beyond |= int(positions.max()) >= rows
        return table in self.tables and positions.unique().numel() == rows > 1


def _sizes(value: Any) -> tuple[int, ...] | None:
    """The shape of a node's result; ``None`` if it has none, or if data decide a size."""
    shown = value.meta.get("val") if isinstance(value, fx.Node) else value
    if not isinstance(shown, Tensor) or not all(type(n) is int for n in shown.shape):
        return None
    return tuple(shown.shape)


def _reduces_one(node: fx.Node) -> bool:
    """Whether an operation reduces dimensions of size 1, or pools to the size that there is."""
    shown, name = node.meta.get("val"), short_name(node)
    first = node.args[0] if node.args else None
    before = _sizes(first)
    if not isinstance(first, fx.Node) or before is None:
        return False
    after = _sizes(shown[0] if isinstance(shown, list | tuple) and shown else shown)
    if name.startswith("adaptive_"):
        rank = int(name[-2]) if name[-2].isdigit() else 1
        return after is not None and after[-rank:] == before[-rank:]
    if name not in REDUCED or len(node.args) < 2 or short_name(first) in (*REDUCED, "unsqueeze"):
        return False
    dims: Any = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
    if not dims or not all(type(dim) is int and -len(before) <= dim < len(before) for dim in dims):
        return False
    return all(before[dim] == 1 for dim in dims)


class Hidden(NamedTuple):
    """What a capture cannot show at its sizes.

    Attributes:
        operations: operation -> what happens to a value. A result is ``"empty"``, the only part
            into which it is split (``"alone"``), a mean over ``"one"`` element, the ``"whole"`` of
            a table, a part of a buffer with only ``"zeros"``, or the same number everywhere only
            because sizes are small, as ``arange(n) >= 4`` is (``"flat"``).
        out_of_bounds: whether a table is read beyond its end, which no run without numbers notices.
    """

    operations: Mapping[fx.Node, str]
    out_of_bounds: bool


@with_numbers()
def hidden(captured: Captured) -> Hidden:
    """Look at all operations of a capture."""
    looker = _Looker(captured)
    return Hidden(looker.look(), looker.beyond)


def still_hidden(first: Hidden, other: Hidden) -> list[str]:
    """Places (file and line) that hide the same in two captures, at two sizes."""
    one, two = _places(first.operations), _places(other.operations)
    return sorted(
        {
            line.rpartition("/")[2]
            for (line, kind), sizes in one.items()
            if line and sizes != two.get((line, kind), sizes)
        }
    )


def _places(found: Mapping[fx.Node, str]) -> dict[tuple[str, str], list[Any]]:
    """Line and reason -> the sizes of the operands."""
    sizes: dict[tuple[str, str], list[Any]] = {}
    for node, kind in found.items():
        part = kind == "empty" and short_name(node) in PARTS
        if part or kind in ("zeros", "flat"):
            first = node.args[0] if node.args else None
            sizes.setdefault((place(node)[1], kind), []).append(_sizes(first))
    return sizes


def _computed(node: fx.Node, held: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The result of an operation on numbers that do not depend on data.

    Args:
        node: the operation.
        held: what is known of other nodes.

    Returns:
        The result, or ``None`` if it depends on data, is random, large, or no tensor.
    """
    target, operands = node.target, node.all_input_nodes
    plain = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    if not plain or writes(node) or any(operand not in held for operand in operands):
        return None
    sizes = [_sizes(one) for one in (node, *operands)]
    # (products of matrices take long, and no mask is made of them)
    heavy = facts_of(node).kind == "contraction"
    if heavy or any(one is None or math.prod(one) > LARGEST for one in sizes):
        return None
    args, kwargs = fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda operand: with_value(held[operand])
    )
    return value_of(fold_constant(node, args, kwargs))


def _is_flat_here(node: fx.Node, whole: Tensor, value: Tensor) -> bool:
    """Whether different numbers have become the same one, and larger sizes may change that: from
    zero, numbers that count sizes go upwards, and pass a lower bound for ever.
    """
    if value.numel() < 2 or not _is_flat(value) or _is_flat(whole):
        return False
    bounded = len(node.args) > 1 and isinstance(node.args[1], int | float)
    passed = {"ge": True, "gt": True, "le": False, "lt": False}.get(short_name(node))
    upwards = bounded and passed is not None and bool((whole >= 0).all())
    return not (upwards and bool(value.reshape(-1)[0]) == passed)


def _is_flat(value: Tensor) -> bool:
    """Whether all elements are the same number."""
    return value.numel() < 2 or bool((value == value.reshape(-1)[0]).all())
