"""Numbers that a model's code reads while it is traced.

Tensors have no values then. A number that follows from buffers and constants alone is computed
where it is asked for, from the operations recorded so far; a number that follows from an input or a
parameter stays unknown, and torch says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback as provenance
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..models.values import has_values, with_numbers
from .captured import source_line
from .writes import WriteError, storages, writes

_READS_DATA, _SETS_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
# no table of more elements is computed
LARGEST = 1 << 24


class _Unknown(Exception):
    """A value follows from an input or a parameter."""


class KnownNumbers(TorchFunctionMode):
    """Answers questions about values, where these follow from known tensors (``known``: the value
    of a tensor without values, by its id); ``failures`` are raised where a result depends on them.
    """

    def __init__(
        self,
        node_of: Callable[[Tensor], fx.Node | None],
        constant: Callable[[fx.Node], Any],
        known: Mapping[int, Tensor],
        failures: tuple[type[Exception], ...],
    ) -> None:
        super().__init__()
        self._node_of, self._constant = node_of, constant
        self._known, self._failures = known, failures
        # buffers and constants of which a number was read
        self.read: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        provenance.set_stack_trace([source_line()])
        if func == _READS_DATA:
            return args[0].detach()
        if func == _SETS_DATA:
            raise WriteError("it sets the data of a tensor, which no graph shows")
        if func is Tensor.__getitem__:
            args = args[0], self._by_positions(args[1])
        try:
            return func(*args, **kwargs)
        except self._failures:
            values = self._values((args, kwargs))
            if values is not None:
                with with_numbers(), torch.no_grad():
                    return func(*values[0], **values[1])
            # (a number may be asked for by an operation on other tensors)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            numbers = [self._number(leaf) for leaf in leaves]
            if all(number is leaf for number, leaf in zip(numbers, leaves, strict=True)):
                raise
            args, kwargs = pytree.tree_unflatten(numbers, spec)
            return func(*args, **kwargs)

    def _number(self, operand: Any) -> Any:
        """A number in place of a known whole number in a tensor without dimensions."""
        if not isinstance(operand, Tensor) or operand.dim() or operand.is_floating_point():
            return operand
        values = self._values(operand)
        return operand if values is None else values.item()

    def _by_positions(self, index: Any) -> Any:
        """An index in which each known mask is replaced by the positions where it is true: how
        many these are decides the shape of the result.
        """
        parts: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            mask = isinstance(part, Tensor) and part.dtype == torch.bool
            values = self._values(part) if mask else None
            with with_numbers():
                parts += [part] if values is None else values.nonzero(as_tuple=True)
        return tuple(parts) if isinstance(index, tuple) or len(parts) > 1 else parts[0]

    def _values(self, operands: Any) -> Any:
        """Operands with values in place of traced tensors; ``None`` if one is unknown."""
        replayed = partial(self._replayed, dict[fx.Node, Any]())
        try:
            with with_numbers(), torch.no_grad():
                return pytree.tree_map_only(Tensor, replayed, operands)
        except _Unknown:
            return None

    def _held(self, tensor: Any) -> Tensor:
        """The value of a buffer or constant."""
        held = self._known.get(id(tensor))
        if held is None and isinstance(tensor, Tensor) and has_values(tensor):
            held = tensor
        if held is None:
            raise _Unknown
        self.read.append(held)
        return held

    def _replayed(self, found: dict[fx.Node, Any], tensor: Tensor) -> Any:
        """A value, computed by all operations on which it depends, writes included, but for those
        that were found for other operands.
        """
        wanted = self._node_of(tensor)
        if wanted is None:
            return self._held(tensor)
        needed = _dependencies(wanted) - found.keys()
        for node in wanted.graph.nodes:
            if node in needed:
                found[node] = self._one(node, found)
        return found[wanted]

    def _one(self, node: fx.Node, found: Mapping[fx.Node, Any]) -> Any:
        """The value of one node."""
        if node.op in ("get_attr", "placeholder"):
            return self._held(self._constant(node)).clone()
        shown = [
            leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)
        ]
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if random or node.op != "call_function" or any(leaf.numel() > LARGEST for leaf in shown):
            raise _Unknown
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
        operation: Any = node.target
        return operation(*args, **kwargs)


def _dependencies(wanted: fx.Node) -> set[fx.Node]:
    """The nodes on which one depends: their operands, and what writes into the same memory."""
    written: dict[int, list[fx.Node]] = {}
    for node in wanted.graph.nodes:
        if writes(node) and isinstance(node.args[0], fx.Node):
            for memory in storages(node.args[0]):
                written.setdefault(memory, []).append(node)
    found: set[fx.Node] = set()
    waiting = [wanted]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
            waiting += [write for memory in storages(node) for write in written.get(memory, ())]
    return found
