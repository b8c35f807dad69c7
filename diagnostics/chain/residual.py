"""Which additions of a captured graph are chain nodes, ``x_l = x_{l-1} + z_l``,
and why the others are not.

The stream is the operand from which the other one, the predicted direction, is computed
through learnable weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from pathspace.capture.captured import Captured, place
from pathspace.inference.registry import facts_of

from .dataflow import (
    AFFINE,
    MOVES,
    SCALES,
    Dataflow,
    halves,
    is_float_node,
    is_seen,
    is_strided,
    kind_of,
    short,
)

_RISES = ("transposed convolution", "upsampling")
_NO_STREAM = "neither operand is carried to the sum unchanged or by an affine shortcut"


@dataclass(frozen=True)
class Residual:
    """A chain node of the graph; ``direction`` says which operand (0 or 1) is
    the predicted direction.
    """

    node: fx.Node
    kind: str
    direction: int
    encloses: tuple[str, ...]
    start: fx.Node  # the value from which both operands come


@dataclass(frozen=True)
class Dismissed:
    """An addition or concatenation that is not a chain node."""

    operation: str
    module: str
    source: str
    reason: str


class Finder:
    """Decides for every addition of two activations whether it is a chain node."""

    def __init__(self, captured: Captured) -> None:
        self.graph = Dataflow(captured)
        self.found: list[Residual] = []
        self.dismissed: list[Dismissed] = []
        self.streams: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            self._judge(node)
        self._drop_skips_inside_branches()
        self._drop_differences()

    def _judge(self, node: fx.Node) -> None:
        operation, facts = kind_of(node), facts_of(node)
        if short(node) == "cat" and len(self.graph.data_inputs(node)) > 1:
            self._dismiss(node, "joins features side by side; nothing is added to a stream")
        between = short(node) == "lerp"
        if (
            operation == "combination"
            and not between
            and len(node.args) > 2
            and len(self.graph.data_inputs(node)) > 1
        ):
            self._dismiss(
                node, "a fused product and sum: write x + scale * z to make it a chain node"
            )
        fused = operation == "contraction" and facts.bias == 0
        if fused and self._from_data(node.args[0]) and any(map(self._from_data, node.args[1:])):
            self._dismiss(node, "a fused product and sum: write x + a @ b to make it a chain node")
        if operation in ("total", "mean") and self._sums_stack(node):
            self._dismiss(node, "a sum of stacked values: write x + z to make it a chain node")
        if operation != "sum" and not between:
            return
        arguments = [*node.args[:2], node.kwargs.get("other")]
        operands = [value for value in arguments if isinstance(value, fx.Node)]
        if len(operands) != 2 or not all(map(is_float_node, operands)):
            return
        left, right = (self.graph.operand(node, position) for position in (0, 1))
        shape = node.meta["val"].shape
        if not shape:
            self._dismiss(node, "a sum of scalars, as in a loss")
        elif not (self.graph.data(left) and self.graph.data(right)):
            self._dismiss(
                node, "one operand does not depend on the input (a bias, a position table, a mask)"
            )
        elif left.meta["val"].shape != shape or right.meta["val"].shape != shape:
            self._dismiss(node, "one operand is broadcast: it carries fewer values than the stream")
        elif not is_seen(node):
            self._dismiss(node, "made inside one of torch's own functions")
        else:
            self._judge_pair(node, left, right)

    def _from_data(self, value: object) -> bool:
        return isinstance(value, fx.Node) and is_float_node(value) and self.graph.data(value)

    def _sums_stack(self, node: fx.Node) -> bool:
        stack = node.args[0]
        if (
            not isinstance(stack, fx.Node)
            or short(stack) != "stack"
            or len(self.graph.data_inputs(stack)) < 2
        ):
            return False
        return bool(node.meta["val"].shape == self.graph.data_inputs(stack)[0].meta["val"].shape)

    def _judge_pair(self, node: fx.Node, left: fx.Node, right: fx.Node) -> None:
        directions = (1,) if short(node).startswith(("sub", "lerp")) else (1, 0)
        reasons: list[str] = []
        best: Residual | None = None
        for direction in directions:
            stream, branch = (left, right) if direction else (right, left)
            kind, source, reason = self._route(stream, branch)
            if kind and (best is None or _ORDER[kind] < _ORDER[best.kind]):
                assert source is not None
                inside = tuple(
                    r.node.name for r in self.found if self._inside(r.node, source, branch)
                )
                best = Residual(node, kind, direction, inside, source)
            reasons.append(reason)
        if best is None:
            # the most specific reason
            self._dismiss(
                node, next((reason for reason in reasons if reason != _NO_STREAM), _NO_STREAM)
            )
            return
        self.found.append(best)
        self.streams[node] = left if best.direction else right

    def _inside(self, node: fx.Node, source: fx.Node, branch: fx.Node) -> bool:
        return (
            node is not source
            and self.graph.depends(node, source)
            and self.graph.depends(branch, node)
        )

    def _route(self, stream: fx.Node, branch: fx.Node) -> tuple[str, fx.Node | None, str]:
        """Go back from the stream to a value from which the branch is computed."""
        graph, node, kind = self.graph, stream, "identity"
        rises = position = projected = False
        parts: list[fx.Node] = []  # parts that are cut out of the current value
        while not graph.depends(branch, node):
            if node in self.streams:
                kind = max(kind, "parallel", key=_ORDER.__getitem__)
                node = self.streams[node]
                continue
            if graph.is_part(node):
                parts.append(node)
                position |= graph.is_position(node)
                projected |= is_strided(node)
                kind = "shortcut" if projected else kind
                node = graph.whole(node)
                continue
            data = graph.data_inputs(node)
            if not graph.carries(node):
                if kind_of(node) not in AFFINE or len(data) != 1 or not graph.is_affine(node):
                    return "", None, _NO_STREAM
                kind, parts = "shortcut", []
                projected |= kind_of(node) not in SCALES
                rises |= kind_of(node) in _RISES
            node = data[0]
        if graph.depends(stream, branch):
            return "", None, "the stream is computed from the branch"
        why = self._no_residual(
            stream, branch, node, kind, projected, parts, position
        ) or self._long_skip(stream, branch, node, rises)
        return ("", None, why) if why else (kind, node, "")

    def _no_residual(
        self,
        stream: fx.Node,
        branch: fx.Node,
        node: fx.Node,
        kind: str,
        projected: bool,
        parts: list[fx.Node],
        position: bool,
    ) -> str:
        """Why a branch that starts from a stream at a node is not a residual branch, or ``""``."""
        graph = self.graph
        if node is branch:
            return "both operands are one value"
        if parts and not graph.reaches(node, branch, lambda n: self._is_other_part(n, node, parts)):
            return "the operands are made from different parts of a split"
        if position and not any(self._is_same_part(n, parts) for n in graph.between(node, branch)):
            return (
                "one operand is made from a single position of a sequence: an input, not a stream"
            )
        if not graph.layers(node, branch):
            return "there is no learnable map from one operand to the other"
        if graph.only_scales(node, branch):
            return "the branch is a weighted copy or shift of the stream, not a learnable map"
        shared = graph.weights(node, stream) & graph.weights(node, branch)
        # ((1 - a) x + a f(x) is x + a (f(x) - x))
        interpolates = shared and not projected
        if kind == "shortcut" and graph.affine(node, branch) and not interpolates:
            return (
                "both operands are affine in one value: parallel linear maps, not a step along a"
                " stream"
            )
        if projected and graph.layers(node, branch) < 2:
            return (
                "the branch has a single layer: two readings of one value, not a block with a"
                " shortcut"
            )
        if projected and shared:
            return (
                "the shortcut's weights feed the branch, too: an input that is read again at every"
                " step"
            )
        return ""

    def _long_skip(self, stream: fx.Node, branch: fx.Node, node: fx.Node, rises: bool) -> str:
        graph = self.graph
        named = not rises and any(kind_of(n) in _RISES for n in graph.between(node, branch))
        # if every path of the branch reduces the resolution but the stream does not, the
        # branch restores it later
        kept = not halves(node, stream) and graph.reaches(node, stream, graph.falls)
        if named or (kept and not graph.reaches(node, branch, graph.falls)):
            return "a long skip across resolutions: the other operand was down- and up-sampled"
        return ""

    def _is_other_part(self, node: fx.Node, source: fx.Node, parts: list[fx.Node]) -> bool:
        return (
            not self._is_same_part(node, parts)
            and self.graph.is_part(node)
            and self.graph.cuts(node, source)
        )

    def _is_same_part(self, node: fx.Node, parts: list[fx.Node]) -> bool:
        return any(node.target is part.target and node.args[1:] == part.args[1:] for part in parts)

    def _drop_skips_inside_branches(self) -> None:
        """Dismiss scaled or projected skips inside another node's branch, which continue no stream.

        A skip that starts at the same value as the branch is kept: it is the first
        step of a narrower stream.
        """
        branches = [
            (r.start, self.graph.operand(r.node, r.direction))
            for r in self.found
            if r.kind == "identity"
        ]
        for residual in [r for r in self.found if r.kind == "shortcut"]:
            ends = (residual.start, residual.node)
            others = [
                (source, branch) for source, branch in branches if source is not residual.start
            ]
            if any(self._inside(end, source, branch) for end in ends for source, branch in others):
                self._dismiss(residual.node, "a projected skip inside the branch of another node")
                self.found.remove(residual)

    def _drop_differences(self) -> None:
        """Dismiss ``x - y`` in a step ``x - a (x - y)``, which takes the stream away again."""
        graph = self.graph
        for step in list(self.found):
            value = graph.operand(step.node, step.direction)
            while kind_of(value) in SCALES | MOVES and len(graph.data_inputs(value)) == 1:
                value = graph.data_inputs(value)[0]
            inner = next((r for r in self.found if r.node is value), None)
            if inner is not None and self.streams[inner.node] is self.streams[step.node]:
                self._dismiss(inner.node, "the difference in a step between two values")
                self.found.remove(inner)

    def _dismiss(self, node: fx.Node, reason: str) -> None:
        self.dismissed.append(Dismissed(short(node), *place(node), reason))


_ORDER = {"identity": 0, "parallel": 1, "shortcut": 2}
