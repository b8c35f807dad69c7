"""Networks of one operation: rows of units, the operation, a weight for each
element of what it returns.

The graphs are built by hand, since capture would take many operations apart: ``y = v op(h,
...)`` with ``h = W x`` laid out as the operation wants it, and one parameter ``v`` for each
element that the operation returns.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import pathspace.fitting.clips  # noqa: F401  (it brings the rule of lifted clips)
from pathspace.capture.captured import Captured
from pathspace.inference.interpreter import interpret
from pathspace.inference.scales import Scales
from pathspace.inference.units import build_graph
from pathspace.reduction import ReductionGraph

aten = torch.ops.aten
FEATURES = 3


@dataclass(frozen=True, eq=False)
class Act:
    """An activation ``W x``: one free scale for each element.

    Attributes:
        shape: its shape.
        low: least value at the network's own weights.
        high: largest value.
        values: the values themselves, in place of ``low`` and ``high``.
        through: operations that are applied to it before it is used, with their further arguments.
    """

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    values: Tensor | None = None
    through: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Par:
    """A parameter that the operation reads itself."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Net:
    """A graph with its parameters.

    Attributes:
        captured: the graph as capture would give it.
        x: the input.
        own: size of the input -> the output with the network's own parameters, where it is known.
    """

    captured: Captured
    x: Tensor
    own: dict[float, Tensor] = field(default_factory=dict)

    def trace(self) -> tuple[ReductionGraph, list[str]]:
        """The reduction graph, and the reasons of its pins."""
        scales, _ = interpret(self.captured, Scales)
        return build_graph(self.captured, scales), [pin.reason for pin in scales.pins]

    def run(self, factors: dict[str, Tensor], size: float = 1.0) -> Tensor:
        """The output with rescaled parameters at ``size * x``, with the same random numbers."""
        torch.default_generator.manual_seed(0)
        values = [
            p.detach() * factors.get(n, torch.ones(())) for n, p in self.captured.parameters.items()
        ]
        with torch.no_grad():
            known = [tensor.clone() for tensor in self.captured.constants.values()]
            return fx.Interpreter(self.captured.graph).run(*values, size * self.x, *known)[0]


def registered(name: str) -> str:
    """The name under which a rule is registered; other libraries than torch are spelled out."""
    return name if "." in name else f"aten.{name}"


def packet_of(name: str) -> Any:
    """The operation itself.

    Raises:
        AttributeError: this version of torch has none of this name.
    """
    library, _, plain = registered(name).partition(".")
    return getattr(getattr(torch.ops, library), plain)


def overload_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The overload of an operation that takes the arguments, and what it returns."""
    packet = packet_of(name)
    copies = pytree.tree_map(lambda a: a.clone() if isinstance(a, Tensor) else a, (args, kwargs))
    for overload in packet.overloads():
        torch.default_generator.manual_seed(0)
        try:
            result = getattr(packet, overload)(*copies[0], **copies[1])
        except Exception:
            continue
        return getattr(packet, overload), result
    raise TypeError(f"aten.{name} does not take these arguments")


def is_operand(leaf: Any) -> bool:
    """Whether an argument is read by the graph (and not written into it)."""
    return isinstance(leaf, Act | Par | Tensor)


class Writer:
    """Writes a graph and runs it at once, so that every node carries its result."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
        self.real: dict[fx.Node, Any] = {}
        self.held: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)
        self.x = self.draw(FEATURES)

    def draw(self, *sizes: int) -> Tensor:
        """Random numbers away from zero."""
        numbers = torch.rand(*sizes, generator=self.generator, dtype=torch.float64) * 1.5 + 0.5
        return numbers * (torch.rand(*sizes, generator=self.generator) < 0.5).double().mul(2).sub(1)

    def note(self, node: fx.Node, real: Any) -> fx.Node:
        """Keep what a node returns."""
        self.real[node] = real
        shown = pytree.tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, real
        )
        node.meta["val"] = pytree.tree_map(
            lambda leaf: self.mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, shown
        )
        return node

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Add an operation."""
        node = self.graph.call_function(target, args, kwargs or {})
        inside = fx.node.map_arg((args, kwargs or {}), self.real.__getitem__)
        torch.default_generator.manual_seed(0)
        return self.note(node, target(*inside[0], **inside[1]))

    def operand(self, leaf: Any, key: str, nodes: dict[str, fx.Node]) -> fx.Node:
        """What the operation reads in place of a leaf of its arguments."""
        if not isinstance(leaf, Act):
            return nodes[key]
        node = self.call(aten.mv.default, (nodes[key], nodes["x"]))
        node = self.call(aten.reshape.default, (node, list(leaf.shape)))
        for step in leaf.through:
            node = self.call(step[0], (node, *step[1:]))
        return node

    def tensor_for(self, leaf: Any) -> Tensor:
        """The parameter or constant behind a leaf."""
        if isinstance(leaf, Tensor):
            return leaf.clone()
        if isinstance(leaf, Par):
            return self.draw(*leaf.shape)
        count = math.prod(leaf.shape)
        weight, wanted = self.draw(count, FEATURES), leaf.values
        if wanted is None:
            wanted = torch.rand(count, generator=self.generator, dtype=torch.float64)
            wanted = wanted * (leaf.high - leaf.low) + leaf.low
        return weight * (wanted.reshape(-1) / (weight @ self.x))[:, None]


def network(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], most: int | None = None
) -> Net:
    """A network around one operation.

    Args:
        name: the operation, without namespace.
        args: arguments, in which :class:`Act` and :class:`Par` stand for activations and
            parameters; tensors are constants.
        kwargs: keyword arguments.
        most: how many of several results are read; all unless told otherwise.

    Raises:
        TypeError: the operation does not take the arguments, or returns nothing
            that could be an activation.
    """
    writer, keys = Writer(), {}
    for leaf in filter(is_operand, pytree.tree_leaves((args, kwargs))):
        if id(leaf) not in keys:
            kind = "c" if isinstance(leaf, Tensor) else "w"
            keys[id(leaf)] = key = f"{kind}{len(keys)}"
            (writer.constants if kind == "c" else writer.held)[key] = writer.tensor_for(leaf)
    nodes = {}
    for key, tensor in (*writer.held.items(), ("x", writer.x), *writer.constants.items()):
        nodes[key] = writer.note(writer.graph.placeholder(key), tensor)
    read: dict[int, fx.Node] = {}
    for leaf in filter(is_operand, pytree.tree_leaves((args, kwargs))):
        if id(leaf) not in read:
            read[id(leaf)] = writer.operand(leaf, keys[id(leaf)], nodes)
    own, named = pytree.tree_map(lambda a: read[id(a)] if is_operand(a) else a, (args, kwargs))
    given = fx.node.map_arg((own, named), writer.real.__getitem__)
    overload, _ = overload_of(name, tuple(given[0]), dict(given[1]))
    result = writer.call(overload, tuple(own), dict(named))
    parts = _parts(writer, result, most)
    first = next(iter(nodes.values()))
    for i, part in enumerate(parts):
        weight = writer.draw(writer.real[part].numel())
        writer.held[f"out{i}"] = weight
        with writer.graph.inserting_before(first):
            node = writer.note(writer.graph.placeholder(f"out{i}"), weight)
        parts[i] = writer.call(aten.mul.Tensor, (node, part))
    total = parts[0] if len(parts) == 1 else writer.call(aten.cat.default, (parts,))
    writer.graph.output((total,))
    # placeholders stand in the order of the values given to them
    places = {node.name: node for node in writer.graph.nodes if node.op == "placeholder"}
    order = [*writer.held, "x", *writer.constants]
    for node in reversed([places[key] for key in order]):
        next(iter(writer.graph.nodes)).prepend(node)
    held, constants = writer.held, writer.constants
    parameters = {key: torch.nn.Parameter(tensor) for key, tensor in held.items()}
    sources = (
        {key: ("parameter", key) for key in held}
        | {"x": ("input", "x")}
        | {c: ("constant", c) for c in constants}
    )
    module = fx.GraphModule({}, writer.graph)
    return Net(
        Captured(module, sources, parameters, {key: key for key in held}, constants, {}), writer.x
    )


def _parts(writer: Writer, result: fx.Node, most: int | None) -> list[fx.Node]:
    """What an operation returns, as vectors of real numbers.

    Raises:
        TypeError: none of it could be an activation.
    """
    results, found = writer.real[result], []
    several = isinstance(results, tuple | list)
    for i, leaf in enumerate(results[:most] if several else [results]):
        if not isinstance(leaf, Tensor) or not leaf.numel() or not bool(leaf.isfinite().all()):
            continue
        part = writer.call(operator.getitem, (result, i)) if several else result
        if leaf.is_complex():
            part = writer.call(aten.resolve_conj.default, (part,))
            part = writer.call(aten.view_as_real.default, (part,))
        part = writer.call(aten.reshape.default, (part, [writer.real[part].numel()]))
        if writer.real[part].dtype != torch.float64:
            part = writer.call(aten._to_copy.default, (part,), {"dtype": torch.float64})
        found.append(part)
    if not found:
        raise TypeError("no result that could be an activation")
    return found


def copied(semantics: Any, *args: Any, **kwargs: Any) -> Any:
    """The rule to be wrong with: every result has the ids of the first tensor, unmoved."""
    first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    ids = semantics.activation(first)

    def spread(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # in the order in which they come, as often as they are needed
        again = -(-leaf.numel() // ids.numel())
        return ids.reshape(-1).repeat(again)[: leaf.numel()].reshape(leaf.shape)

    return pytree.tree_map(spread, semantics.place.result)


def all_pinned(semantics: Any, *args: Any, **kwargs: Any) -> Any:
    """The rule that is always sound: nothing keeps a scale."""
    semantics.pin(
        [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)],
        "everything",
    )
    return pytree.tree_map(
        lambda leaf: torch.tensor(0).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf,
        semantics.place.result,
    )


def violation(net: Net, graph: ReductionGraph) -> float:
    """The relative change of the output under random rescalings, for two sizes of the input."""
    worst = 0.0
    for size, seed in ((1.0, 1), (0.05, 2)):
        if size not in net.own:
            net.own[size] = net.run({}, size)
        before = net.own[size]
        phi = torch.randn(
            graph.num_units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        try:
            after = net.run(graph.gauge(phi), size)
        except Exception:
            # values that the operation refuses
            return 1.0
        if before.shape != after.shape:
            return 1.0
        same = (before == after) | (before.isnan() & after.isnan())
        largest = (
            before[before.isfinite()].abs().max().clamp(min=1e-300)
            if bool(before.isfinite().any())
            else 1.0
        )
        gap = torch.where(same, 0.0, (after - before).abs() / largest).max()
        worst = max(worst, float(gap.nan_to_num(nan=1.0)))
    return worst


Outcome = tuple[int, bool]


def outcome(net: Net, tolerance: float = 1e-8) -> tuple[Outcome, list[str]]:
    """Units, and whether they are symmetries; reasons of pins."""
    graph, reasons = net.trace()
    return (graph.num_units, violation(net, graph) < tolerance), reasons


__all__ = ["Act", "Net", "Par", "all_pinned", "copied", "is_operand", "network", "outcome",
           "overload_of", "packet_of", "registered", "violation"]  # fmt: skip
