"""Dependences between the values of a captured graph: paths between values,
and the operations on them.

After an in-place operation, the operand's name refers to its latest result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property, reduce
from operator import or_

import torch
from torch import fx

from pathspace.capture.captured import Captured
from pathspace.inference.registry import facts_of, operation_name

from .addition_hooks import ADDITIONS
from .inline_regions import inline_regions

# kinds of operations that pass on the values of one activation (perhaps dropped or reordered)
MOVES = frozenset(["copy", "movement", "dropout"])
# kinds of operations in a down-sampling shortcut: affine in their activation, or nearly so
AFFINE = frozenset(
    ["contraction", "convolution", "transposed convolution", "normalisation", "average pooling",
     "maximum pooling",
     "product", "quotient", "sum", "combination", "padding", "concatenation", "mean", "upsampling",
     "part"]
)  # fmt: skip
SCALES = frozenset(["product", "quotient"])
# linear too, but not part of a stream: they copy values, or combine several into one
_SPREADS = frozenset(["repetition", "total", "split"])
_FALLS = frozenset(
    [
        "convolution",
        "average pooling",
        "maximum pooling",
        "norm pooling",
        "upsampling",
        "resampling",
    ]
)


def kind_of(node: fx.Node) -> str:
    """The kind of a node's operation, from the table of operations."""
    return facts_of(node).kind


def short(node: fx.Node) -> str:
    """``"add_"`` for ``aten.add_.Tensor``."""
    return operation_name(node.target).rsplit(".", 1)[-1] if node.op == "call_function" else node.op


def is_float_node(value: object) -> bool:
    """Whether an argument is a node whose value is a floating-point tensor."""
    shown = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(shown, torch.Tensor) and shown.is_floating_point()


def is_seen(node: fx.Node) -> bool:
    """Whether an addition is in a ``forward``, not inside a function of torch."""
    function = (node.meta.get("torch_fn") or ("", ""))[1]
    return not function or function.rsplit(".", 1)[-1] in ADDITIONS


def _read(node: fx.Node) -> list[fx.Node]:
    """The operands of which a node reads more than the type or the shape, which no value depends
    on; zeros in the shape of a value start a stream in its place.
    """
    if kind_of(node) == "creation" and not short(node).endswith("_like"):
        return []
    return node.all_input_nodes[:1] if short(node).endswith("_as") else node.all_input_nodes


class Dataflow:
    """Dependences of every value on every other; after an in-place operation a name
    refers to its latest result.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.nodes = list(inline_regions(captured.graph).nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.inputs: list[list[fx.Node]] = []
        self.above: list[int] = []  # bit sets: everything a value is computed from, itself included
        self.below_data: list[bool] = []
        latest: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.nodes):
            inputs = [latest.get(operand, operand) for operand in _read(node)]
            self.inputs.append(inputs)
            bits = 1 << i
            for operand in inputs:
                bits |= self.above[self.index[operand]]
            self.above.append(bits)
            kind = captured.sources.get(node.name, ("", ""))[0] if node.op == "placeholder" else ""
            data = kind == "input" or any(
                self.below_data[self.index[operand]] for operand in inputs
            )
            self.below_data.append(data)
            if (
                node.op == "call_function"
                and short(node).endswith("_")
                and not short(node).startswith("__")
            ):
                changed = node.args[0] if node.args else None
                if isinstance(changed, fx.Node):
                    # later uses of the operand's name read the result
                    for old in [
                        key
                        for key, value in latest.items()
                        if value is latest.get(changed, changed)
                    ]:
                        latest[old] = node
                    latest[changed] = node

    def operand(self, node: fx.Node, position: int) -> fx.Node:
        """Operand of an addition, with its value at that time."""
        argument = node.args[position] if position < len(node.args) else node.kwargs["other"]
        assert isinstance(argument, fx.Node)
        return self.inputs[self.index[node]][node.all_input_nodes.index(argument)]

    def depends(self, value: fx.Node, source: fx.Node) -> bool:
        """Whether ``value`` is computed from ``source``."""
        return bool(self.above[self.index[value]] >> self.index[source] & 1)

    def data(self, node: fx.Node) -> bool:
        """Whether a value depends on the model's inputs, not only on parameters and constants."""
        return self.below_data[self.index[node]]

    def between(self, source: fx.Node, value: fx.Node) -> Iterator[fx.Node]:
        """The operations on all paths from ``source`` to ``value``, including ``value``."""
        bits = self.above[self.index[value]]
        for i in range(self.index[source] + 1, self.index[value] + 1):
            if bits >> i & 1 and self.above[i] >> self.index[source] & 1:
                yield self.nodes[i]

    def reaches(self, source: fx.Node, value: fx.Node, blocked: Callable[[fx.Node], bool]) -> bool:
        """Whether a path from ``source`` to ``value`` avoids the blocked operations."""
        reached = {source}
        for node in self.between(source, value):
            if not reached.isdisjoint(self.inputs[self.index[node]]) and not blocked(node):
                reached.add(node)
        return value in reached

    def layers(self, source: fx.Node, value: fx.Node) -> int:
        """Number of operations with a weight on the path; for a sum, the largest
        number over its summands.
        """
        passed = {source: 0}  # bit sets
        for node in self.between(source, value):
            above = [
                passed[operand] for operand in self.inputs[self.index[node]] if operand in passed
            ]
            bits = max(above, key=int.bit_count) if kind_of(node) == "sum" else reduce(or_, above)
            passed[node] = bits | bool(self._own_weights(node)) << self.index[node]
        return passed[value].bit_count()

    def only_scales(self, source: fx.Node, value: fx.Node) -> bool:
        """Whether ``value`` is affine in ``source``, and weights only multiply its entries."""
        weighted = filter(self._own_weights, self.between(source, value))
        return all(kind_of(node) in SCALES for node in weighted) and self.affine(source, value)

    def weights(self, source: fx.Node, value: fx.Node) -> int:
        """Bit set of the parameters of the operations between two values."""
        return reduce(or_, map(self._own_weights, self.between(source, value)), 0)

    def _own_weights(self, node: fx.Node) -> int:
        operands = [a for a in self.inputs[self.index[node]] if not self.data(a)]
        return reduce(or_, (self.above[self.index[a]] for a in operands), 0) & self._parameters

    def weighs(self, node: fx.Node) -> bool:
        """Whether a value is computed from a parameter."""
        return bool(self.above[self.index[node]] & self._parameters)

    def read_once(self, node: fx.Node) -> bool:
        """Whether one operation alone reads a value."""
        return self._readers[node] == 1

    @cached_property
    def _readers(self) -> Counter[fx.Node]:
        return Counter(
            a
            for node, operands in zip(self.nodes, self.inputs, strict=True)
            for a in operands
            if node.op == "output" or isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
        )

    @cached_property
    def _parameters(self) -> int:
        sources = self.captured.sources
        return sum(
            1 << i
            for i, node in enumerate(self.nodes)
            if node.op == "placeholder" and sources.get(node.name, ("", ""))[0] == "parameter"
        )

    def data_inputs(self, node: fx.Node) -> list[fx.Node]:
        """The operands that depend on the input, without masks and shapes."""
        return [a for a in self.inputs[self.index[node]] if self.data(a) and is_float_node(a)]

    def carries(self, node: fx.Node) -> bool:
        """Whether an operation passes on the values of its only activation."""
        operation, arguments = kind_of(node), [*node.args, *node.kwargs.values()]
        # sum() of a list starts with 0 + x
        nothing = operation == "sum" and any(
            isinstance(a, int | float) and a == 0 for a in arguments[:2]
        )
        whole = (operation == "part" or short(node) == "getitem") and not self.is_part(node)
        moves = operation in MOVES or nothing or whole
        return moves and len(self.data_inputs(node)) == 1

    def is_affine(self, node: fx.Node) -> bool:
        """Whether an operation is affine in its activations; sums and
        concatenations may have several.
        """
        operation = kind_of(node)
        if operation in ("sum", "concatenation"):
            return True
        activations = sum(
            isinstance(a, fx.Node) and self.data(a) and is_float_node(a) for a in node.args
        )
        known = operation in MOVES | AFFINE | _SPREADS or short(node) == "getitem"
        one = activations <= 1 and len(self.data_inputs(node)) <= 1
        return known and one and not self.divides(node)

    def divides(self, node: fx.Node) -> bool:
        """Whether an operation divides by an activation."""
        below = node.args[1] if kind_of(node) == "quotient" and len(node.args) > 1 else None
        return isinstance(below, fx.Node) and self.data(below)

    def affine(self, source: fx.Node, value: fx.Node) -> bool:
        """Whether ``value`` is affine in ``source``, because every operation between them is."""
        return all(map(self.is_affine, self.between(source, value)))

    def is_part(self, node: fx.Node) -> bool:
        """Whether a value is cut out of a larger one."""
        operands = self.inputs[self.index[node]]
        if short(node) == "getitem":
            return kind_of(operands[0]) == "split"
        return kind_of(node) == "part" and operands[0].meta["val"].shape != node.meta["val"].shape

    def whole(self, node: fx.Node) -> fx.Node:
        """The value of which a part is cut out."""
        source = self.inputs[self.index[node]][0]
        return self.inputs[self.index[source]][0] if short(node) == "getitem" else source

    def is_position(self, part: fx.Node) -> bool:
        """Whether a part is one position of a sequence, such as the input of one time step."""
        before, after = self.whole(part).meta["val"].shape, part.meta["val"].shape
        return len(after) < len(before) or any(
            new == 1 < old for old, new in zip(before, after, strict=True)
        )

    def cuts(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether a value is a part of ``source``."""
        cut = False
        while node is not source:
            if self.is_part(node):
                cut, node = True, self.whole(node)
            elif self.carries(node):
                node = self.data_inputs(node)[0]
            else:
                return False
        return cut

    def falls(self, node: fx.Node) -> bool:
        """Whether an operation at least halves a side of the image."""
        data = self.data_inputs(node)
        if kind_of(node) not in _FALLS or not data:
            return False
        before = data[0]
        # (padding is not resolution: 3 -> 7 -> 3 pixels lose nothing)
        while kind_of(before) == "padding" and self.data_inputs(before):
            before = self.data_inputs(before)[0]
        return halves(before, node)


def is_strided(node: fx.Node) -> bool:
    """Whether a part is taken with a stride, so that it leaves out values."""
    return (
        short(node) == "slice"
        and len(node.args) > 4
        and isinstance(node.args[4], int)
        and node.args[4] > 1
    )


def halves(before: fx.Node, after: fx.Node) -> bool:
    """Whether some side of the image is at least halved, the first two dimensions
    being samples and channels.
    """
    sides = zip(before.meta["val"].shape[2:], after.meta["val"].shape[2:], strict=False)
    return any(new < old and 2 * new <= old + 1 for old, new in sides)


__all__ = [
    "AFFINE",
    "MOVES",
    "SCALES",
    "Dataflow",
    "halves",
    "is_float_node",
    "is_seen",
    "is_strided",
    "kind_of",
    "short",
]
