"""A graph without writes: each write into memory becomes a new value, which all later readers see.

Rules treat an operation as a function of its operands. So ``y = x[0]; y.mul_(2); f(x)`` becomes
``y = x[0]; y1 = y * 2; x1 = select_scatter(x, y1, 0, 0); f(x1)``. Which tensors share memory is
read off their storages.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .captured import named_arguments

aten = torch.ops.aten
# views of all elements, in their order
_WHOLE = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze contiguous detach alias to type_as expand"
    " expand_as view_as reshape_as _reshape_alias _unsafe_view lift_fresh ravel atleast_1d"
    " atleast_2d atleast_3d dropout clone _to_copy positive".split()
)
# views that are their own inverse
_MIRRORED = frozenset("transpose t swapaxes swapdims numpy_T mT mH adjoint conj _conj".split())
# (they change running statistics, which rules know by name)
_STATISTICS = ("batch_norm", "instance_norm")
_INTO = {
    "select": aten.select_scatter,
    "slice": aten.slice_scatter,
    "diagonal": aten.diagonal_scatter,
}


class WriteError(RuntimeError):
    """A write that no graph of functions shows."""


def name_of(node: fx.Node) -> str:
    """The name of an operation without namespace and overload."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def writes(node: fx.Node) -> bool:
    """Whether an operation writes into its first operand."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def storages(node: fx.Node) -> set[int]:
    """The storages in which a node's results lie."""
    return {
        leaf.untyped_storage()._cdata
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    }


def without_writes(graph: fx.Graph) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Replace the writes of a captured graph by new values; with the last value of each
    placeholder that is written. A write through a view without an inverse is a :class:`WriteError`.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def forward(x):
        ...     y = x + 1
        ...     y[0].mul_(3)
        ...     return y
        >>> module = make_fx(forward, tracing_mode="fake")(torch.ones(2))
        >>> module.graph, written = without_writes(module.graph)
        >>> module(torch.ones(2)), written
        (tensor([6., 2.]), {})
    """
    found = _Functional()
    for node in graph.nodes:
        found.step(node)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    return found.graph, {node.name: found.now(node) for node in places if found.version[node]}


class _Functional:
    """The values that the names of a graph have at each operation.

    A write changes the tensor that was made first in its memory, the base; other names of this
    memory are read from the base again when they are needed.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.value: dict[fx.Node, Any] = {}
        # a view -> the tensor of which it is a view; the result of a write -> what it writes into
        self.parent: dict[fx.Node, fx.Node] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        # base -> number of writes so far; name -> number of writes that its value has seen
        self.version: dict[fx.Node, int] = {}
        self.seen: dict[fx.Node, int] = {}

    def step(self, node: fx.Node) -> None:
        """Copy one operation, or replace it by one without a write."""
        if node.op == "output":
            self.graph.output(fx.node.map_arg(node.args[0], self.now))
        elif not writes(node) or name_of(node) in _STATISTICS:
            self._known(node, self.graph.node_copy(node, self.now))
        elif torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            self._known(node, self._functional(node))
        else:
            self._write(node)

    def _known(self, node: fx.Node, value: Any) -> None:
        """A new name: of memory of its own, or of that of an operand."""
        own = storages(node) if node.op == "call_function" else set()
        source = next((each for each in node.all_input_nodes if own & storages(each)), None)
        if node.target is operator.getitem and source is not None:
            # (a part of what a view consists of is a view of the same tensor)
            source = self.parent.get(source)
        if source is not None:
            self.parent[node] = self.same.get(source, source)
        self.value[node] = value
        self.seen[node] = self.version.setdefault(self._base(node), 0)

    def _base(self, name: fx.Node) -> fx.Node:
        while name in self.parent:
            name = self.parent[name]
        return name

    def now(self, name: fx.Node) -> Any:
        """The present value of a name."""
        name = self.same.get(name, name)
        version = self.version[self._base(name)]
        if self.seen[name] != version:
            self.value[name] = self.graph.node_copy(name, self.now)
            self.seen[name] = version
        return self.value[name]

    def _write(self, node: fx.Node) -> None:
        written = node.args[0]
        if not isinstance(written, fx.Node):
            raise WriteError(f"{name_of(node)} writes into several tensors")
        name = self.same[node] = self.same.get(written, written)
        value = self._functional(node)
        chain = [name]
        while (source := self.parent.get(name)) is not None:
            self.value[name], value = value, self._scattered(name, value)
            name = source
            chain.append(name)
        self.value[name] = value
        self.version[name] += 1
        self.seen.update(dict.fromkeys(chain, self.version[name]))

    def _functional(self, node: fx.Node) -> Any:
        """The operation that returns what another one writes."""
        name = name_of(node).strip("_")
        target: Any
        rest: Any
        target, *rest = node.args
        shown = node.meta["val"]
        if name in ("copy", "fill") and isinstance(rest[0], fx.Node):
            return self._as(self.now(rest[0]), shown, node)
        if name in ("zero", "fill"):
            value = rest[0] if rest else 0
            return self._made(aten.full_like.default, (self.now(target), value), node)
        library, _, form = node.target.name().partition("::")  # type: ignore[union-attr]
        packet = getattr(getattr(torch.ops, library), name, None)
        overload = getattr(packet, form.partition(".")[2] or "default", None)
        value = self.graph.node_copy(node, self.now)
        if overload is None:
            # (the operation has no other form: it may write into a tensor that nobody else has)
            with self.graph.inserting_before(value):
                own = self._made(aten.clone.default, (value.args[0],), node)
            value.args = (own, *value.args[1:])
        else:
            value.target = overload
        return value

    def _as(self, value: Any, shown: Tensor, node: fx.Node) -> Any:
        """A value in the shape and type of what it is copied into."""
        given = value.meta["val"]
        if given.dtype != shown.dtype:
            value = self._made(aten.to.dtype, (value, shown.dtype), node)
        if given.shape != shown.shape:
            value = self._made(aten.expand.default, (value, list(shown.shape)), node)
        return value

    def _made(
        self, target: Any, args: tuple[Any, ...], node: fx.Node, shown: Any = None
    ) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta = {**node.meta, "val": node.meta["val"] if shown is None else shown}
        return made

    def _scattered(self, view: fx.Node, value: Any) -> Any:
        """The value of the tensor behind a view whose elements have a new value."""
        if view.target is operator.getitem:
            return self._part(view, value)
        source = self.parent[view]
        whole, shown = self.now(source), source.meta["val"]
        name = name_of(view)
        rest: Any = view.args[1:]
        if name == "narrow":
            dim, start, length = rest
            name, rest = "slice", (dim, start, start + length)
        if name in _INTO:
            return self._made(_INTO[name].default, (whole, value, *rest), view, shown)
        if name in _MIRRORED:
            return self._made(view.target, (value, *rest), view, shown)
        if name == "permute":
            order = [dim % shown.dim() for dim in rest[0]]
            back = [order.index(dim) for dim in range(len(order))]
            return self._made(aten.permute.default, (value, back), view, shown)
        if name == "movedim":
            return self._made(view.target, (value, rest[1], rest[0]), view, shown)
        if view.meta["val"].numel() == shown.numel() and name in _WHOLE:
            return self._made(aten.reshape.default, (value, list(shown.shape)), view, shown)
        raise WriteError(f"a write through {name or view.target} has no inverse")

    def _part(self, view: fx.Node, value: Any) -> fx.Node:
        """The value of a tensor that was split, one of whose parts has a new value."""
        parts: Any
        number: Any
        parts, number = view.args
        source = self.parent[view]
        dim = named_arguments(parts.target, parts.args, parts.kwargs)["dim"]
        whole, shown = self.now(source), source.meta["val"]
        if name_of(parts) == "unbind":
            return self._made(aten.select_scatter.default, (whole, value, dim, number), view, shown)
        start = sum(part.shape[dim] for part in parts.meta["val"][:number])
        end = start + view.meta["val"].shape[dim]
        return self._made(aten.slice_scatter.default, (whole, value, dim, start, end), view, shown)
