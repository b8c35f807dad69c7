"""Which additions of a captured graph are chain nodes, ``x_l = x_{l-1} + z_l``, and why the others are not.

The stream is the operand from which the other one, the predicted direction, is computed through learnable weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from diagnostics.inlined import inlined
from diagnostics.sites import ADDITIONS
from pathspace.capture import Captured, place
from pathspace.inference.registry import operation_name

# Operations that hand one activation on, value by value (a dropped or reordered value is still that value).
_MOVES = [
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "contiguous", "clone", "alias",
    "detach", "dropout", "dropout_", "feature_dropout", "native_dropout", "identity", "to", "_to_copy",
    "unsqueeze", "squeeze", "flatten", "unflatten", "movedim", "swapaxes", "lift_fresh_copy", "roll",
    "alpha_dropout", "expand_as",
]  # fmt: skip
# Operations that are affine in their one activation: what a down-sampling shortcut is made of.
_AFFINE = [
    "linear", "conv1d", "conv2d", "conv3d", "convolution", "batch_norm", "instance_norm", "group_norm",
    "layer_norm", "rms_norm", "addmm", "matmul", "mm", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "max_pool2d", "mul", "div", "mul_", "div_", "add", "add_",
    "sub", "neg", "constant_pad_nd", "pad", "cat", "mean", "conv_transpose2d", "upsample_nearest2d",
    "upsample_bilinear2d", "slice", "_native_batch_norm_legit", "native_layer_norm", "native_group_norm",
]  # fmt: skip
_RISES = ("conv_transpose", "upsample", "pixel_shuffle", "interpolate")
_SCALES = ("mul", "mul_", "div", "div_")
MOVES, AFFINE = frozenset(_MOVES), frozenset(_AFFINE)
_NO_STREAM = "neither operand is carried to the sum unchanged or by an affine shortcut"
_SUMS = frozenset(["add", "add_", "sub", "sub_"])


@dataclass(frozen=True)
class Residual:
    """A chain node of the graph; ``direction`` says which operand (0 or 1) is the predicted direction."""

    node: fx.Node
    kind: str
    direction: int
    encloses: tuple[str, ...]
    start: fx.Node  # the value from which both operands come


@dataclass(frozen=True)
class Dismissed:
    """An addition or concatenation that is no chain node."""

    operation: str
    module: str
    source: str
    reason: str


def short(node: fx.Node) -> str:
    """``"add_"`` for ``aten.add_.Tensor``."""
    return operation_name(node.target).rsplit(".", 1)[-1] if node.op == "call_function" else node.op


def is_float(value: object) -> bool:
    """Whether an argument is a node whose value is a floating-point tensor."""
    shown = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(shown, torch.Tensor) and shown.is_floating_point()


def is_seen(node: fx.Node) -> bool:
    """Whether an addition is written in a ``forward``, rather than inside one of torch's own functions."""
    function = (node.meta.get("torch_fn") or ("", ""))[1]
    return not function or function.rsplit(".", 1)[-1] in ADDITIONS


class ResidualGraph:
    """Dependence of every value on every other, with in-place operations followed to their latest result."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.nodes = list(inlined(captured.graph).nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.inputs: list[list[fx.Node]] = []
        self.above: list[int] = []  # bit sets: everything a value is computed from, itself included
        self.below_data: list[bool] = []
        latest: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.nodes):
            inputs = [latest.get(operand, operand) for operand in node.all_input_nodes]
            self.inputs.append(inputs)
            bits = 1 << i
            for operand in inputs:
                bits |= self.above[self.index[operand]]
            self.above.append(bits)
            kind = captured.sources.get(node.name, ("", ""))[0] if node.op == "placeholder" else ""
            data = kind == "input" or any(self.below_data[self.index[operand]] for operand in inputs)
            self.below_data.append(data)
            if node.op == "call_function" and short(node).endswith("_") and not short(node).startswith("__"):
                changed = node.args[0] if node.args else None
                if isinstance(changed, fx.Node):
                    # later uses of the operand, under its old name, see the result
                    for old in [key for key, value in latest.items() if value is latest.get(changed, changed)]:
                        latest[old] = node
                    latest[changed] = node

    def operand(self, node: fx.Node, position: int) -> fx.Node:
        """Operand of an addition, as the value it had at that moment."""
        argument = node.args[position] if position < len(node.args) else node.kwargs["other"]
        assert isinstance(argument, fx.Node)
        matching = [a for a in self.inputs[self.index[node]] if a is argument]
        if matching:
            return argument
        originals = list(node.all_input_nodes)
        return self.inputs[self.index[node]][originals.index(argument)]

    def depends(self, value: fx.Node, source: fx.Node) -> bool:
        """Whether ``value`` is computed from ``source``."""
        return bool(self.above[self.index[value]] >> self.index[source] & 1)

    def data(self, node: fx.Node) -> bool:
        """Whether a value depends on the model's inputs, rather than on parameters and constants alone."""
        return self.below_data[self.index[node]]

    def between(self, source: fx.Node, value: fx.Node) -> Iterator[fx.Node]:
        """The operations on the ways from ``source`` to ``value``, ``value`` included."""
        bits = self.above[self.index[value]]
        for i in range(self.index[source] + 1, self.index[value] + 1):
            if bits >> i & 1 and self.above[i] >> self.index[source] & 1:
                yield self.nodes[i]

    def layers(self, source: fx.Node, value: fx.Node) -> int:
        """How many operations on the way use a weight."""
        return sum(
            any(not self.data(operand) and self._weighs(operand) for operand in self.inputs[self.index[node]])
            for node in self.between(source, value)
        )

    def _weighs(self, node: fx.Node) -> bool:
        return bool(self.above[self.index[node]] & self._parameters)

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
        return [a for a in self.inputs[self.index[node]] if self.data(a) and is_float(a)]


class Finder:
    """Decide for every addition of two activations whether it is a chain node."""

    def __init__(self, captured: Captured) -> None:
        self.graph = ResidualGraph(captured)
        self.found: list[Residual] = []
        self.dismissed: list[Dismissed] = []
        self.streams: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            self._judge(node)
        self._drop_skips_inside_branches()

    def _judge(self, node: fx.Node) -> None:
        operation = short(node)
        if operation == "cat" and len(self.graph.data_inputs(node)) > 1:
            self._dismiss(node, "joins features side by side; nothing is added to a stream")
        if operation in ("addcmul", "addcmul_", "lerp") and len(self.graph.data_inputs(node)) > 1:
            self._dismiss(node, "a fused product and sum: write x + scale * z to make it a chain node")
        if operation not in _SUMS:
            return
        arguments = [*node.args[:2], node.kwargs.get("other")]
        operands = [value for value in arguments if isinstance(value, fx.Node)]
        if len(operands) != 2 or not all(map(is_float, operands)):
            return
        left, right = (self.graph.operand(node, position) for position in (0, 1))
        shape = node.meta["val"].shape
        if not shape:
            self._dismiss(node, "a sum of scalars, as in a loss")
        elif not (self.graph.data(left) and self.graph.data(right)):
            self._dismiss(node, "one operand does not depend on the input (a bias, a position table, a mask)")
        elif left.meta["val"].shape != shape or right.meta["val"].shape != shape:
            self._dismiss(node, "one operand is broadcast: it carries fewer values than the stream")
        elif not is_seen(node):
            self._dismiss(node, "made inside one of torch's own functions")
        else:
            self._judge_pair(node, left, right)

    def _judge_pair(self, node: fx.Node, left: fx.Node, right: fx.Node) -> None:
        directions = (1,) if short(node).startswith("sub") else (1, 0)
        reasons: list[str] = []
        best: Residual | None = None
        for direction in directions:
            stream, branch = (left, right) if direction else (right, left)
            kind, source, reason = self._route(stream, branch)
            if kind and (best is None or _ORDER[kind] < _ORDER[best.kind]):
                assert source is not None
                inside = tuple(r.node.name for r in self.found if self._inside(r.node, source, branch))
                best = Residual(node, kind, direction, inside, source)
            reasons.append(reason)
        if best is None:
            # the reason that says most
            self._dismiss(node, next((reason for reason in reasons if reason != _NO_STREAM), _NO_STREAM))
            return
        self.found.append(best)
        self.streams[node] = left if best.direction else right

    def _inside(self, node: fx.Node, source: fx.Node, branch: fx.Node) -> bool:
        return node is not source and self.graph.depends(node, source) and self.graph.depends(branch, node)

    def _route(self, stream: fx.Node, branch: fx.Node) -> tuple[str, fx.Node | None, str]:
        """Walk up from the stream until a value is met that the branch is computed from."""
        graph, node, kind = self.graph, stream, "identity"
        rises = False
        while not graph.depends(branch, node):
            operation = short(node)
            data = graph.data_inputs(node)
            if node in self.streams:
                kind = max(kind, "parallel", key=_ORDER.__getitem__)
                node = self.streams[node]
                continue
            if operation in ("getitem", "select") or (operation == "slice" and not _strided(node)):
                return "", None, "the operands are made from different parts of a split"
            if len(data) != 1 or operation not in MOVES | AFFINE:
                return "", None, _NO_STREAM
            if operation not in MOVES:
                kind = "shortcut"
                rises |= operation.startswith(_RISES)
            node = data[0]
        if graph.depends(stream, branch):
            return "", None, "the stream is computed from the branch"
        if node is branch:
            return "", None, "both operands are one value"
        if not graph.layers(node, branch):
            return "", None, "there is no learnable map from one operand to the other"
        way = list(graph.between(node, branch))
        if kind == "shortcut" and all(short(n) in MOVES | AFFINE and len(graph.data_inputs(n)) <= 1 for n in way):
            return "", None, "both operands are affine in one value: parallel linear maps, not a step along a stream"
        if kind == "shortcut" and graph.layers(node, branch) < 2:
            return "", None, "the branch has a single layer: two readings of one value, not a block with a shortcut"
        if not rises and any(short(n).startswith(_RISES) for n in way):
            return "", None, "a long skip across resolutions: the other operand was down- and up-sampled"
        return kind, node, ""

    def _drop_skips_inside_branches(self) -> None:
        """A scaled or projected skip inside another node's branch replaces no stream."""
        branches = [(r.start, self.graph.operand(r.node, r.direction)) for r in self.found if r.kind == "identity"]
        for residual in [r for r in self.found if r.kind == "shortcut"]:
            start = residual.start
            if any(self._inside(start, source, branch) for source, branch in branches):
                self._dismiss(residual.node, "a projected skip inside the branch of another node")
                self.found.remove(residual)

    def _dismiss(self, node: fx.Node, reason: str) -> None:
        self.dismissed.append(Dismissed(short(node), *place(node), reason))

    def readout(self, residual: Residual) -> tuple[tuple[str, ...], fx.Node]:
        """Parameters of the branch's last layers, in which z is linear, and the node that names the branch."""
        graph, sources = self.graph, self.graph.captured.sources
        start = graph.operand(residual.node, residual.direction)
        names: list[str] = []
        producer: fx.Node | None = None
        pending, sound = [start], True
        while pending:
            node = pending.pop()
            operation, data = short(node), graph.data_inputs(node)
            direct = [a for a in graph.inputs[graph.index[node]] if sources.get(a.name, ("", ""))[0] == "parameter"]
            weighs = any(not graph.data(a) and graph._weighs(a) for a in graph.inputs[graph.index[node]])
            passes = operation in MOVES or (operation in _SCALES and not weighs)
            sums = operation in ("add", "sub", "add_") and len(data) == 2
            if operation in _SUMS and len(data) == 1 and direct:
                # a bias of its own: z is linear in it together with what it is added to
                sound &= all(len(a.users) == 1 for a in direct)
                names += [sources[a.name][1] for a in direct]
                pending += data
            elif (passes and len(data) == 1) or sums:
                pending += data
            else:
                layer = operation in AFFINE and len(data) == 1 and direct and operation != "cat"
                sound &= bool(layer) and all(len(a.users) == 1 for a in direct)
                names += [sources[a.name][1] for a in direct] if layer else []
                while operation in _SCALES and len(data) == 1 and producer is None:
                    # a layer scale does not name the branch, what it scales does
                    node = data[0]
                    operation, data = short(node), graph.data_inputs(node)
                    while operation in MOVES and len(data) == 1:
                        node = data[0]
                        operation, data = short(node), graph.data_inputs(node)
                producer = producer or node
        return (tuple(names) if sound else ()), producer or start


_ORDER = {"identity": 0, "parallel": 1, "shortcut": 2}


def _strided(node: fx.Node) -> bool:
    return (len(node.args) > 4 and isinstance(node.args[4], int) and node.args[4] > 1) or _whole(node)


def _whole(node: fx.Node) -> bool:
    operand = node.args[0]
    return isinstance(operand, fx.Node) and operand.meta["val"].shape == node.meta["val"].shape


__all__ = ["Dismissed", "Finder", "Residual", "ResidualGraph", "is_float", "is_seen", "short"]
