"""Networks of one operation: rows of units, the operation, a weight for each element of what it returns.

The graphs are built by hand, since capture would take many operations apart: ``flat(h) -> y`` with ``h = W x + b``
laid out as the operation wants it (and ``g``, a second operand of the same kind).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pathspace.capture import Captured
from pathspace.inference.build import build
from pathspace.inference.interpreter import interpret
from pathspace.inference.units import Scales
from pathspace.reduction import ReductionGraph

aten = torch.ops.aten
FEATURES = 3
H, G = "h", "g"


@dataclass(frozen=True)
class Net:
    """A graph with its parameters.

    Attributes:
        captured: the graph as capture would give it.
        x: the input.
    """

    captured: Captured
    x: Tensor

    def trace(self) -> tuple[ReductionGraph, list[str]]:
        """The reduction graph, and the reasons of its pins."""
        scales, _ = interpret(self.captured, Scales)
        return build(self.captured, scales), [pin.reason for pin in scales.pins]

    def run(self, factors: dict[str, Tensor]) -> Tensor:
        """The output with rescaled parameters; the same random numbers whenever it is run."""
        torch.manual_seed(0)
        values = [p.detach() * factors.get(n, torch.ones(())) for n, p in self.captured.parameters.items()]
        with torch.no_grad():
            known = [tensor.clone() for tensor in self.captured.constants.values()]
            return fx.Interpreter(self.captured.graph).run(*values, self.x, *known)[0]


def operand(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The overload of an operation that takes the arguments."""
    packet = getattr(aten, name)
    for overload in packet.overloads():
        try:
            result = getattr(packet, overload)(*args, **kwargs)
        except Exception:
            continue
        return getattr(packet, overload), result
    raise TypeError(f"aten.{name} does not take these arguments")


def network(name: str, shape: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Net:
    """A network around one operation.

    Args:
        name: the operation, without namespace.
        shape: shape of its activations.
        args: arguments; ``H`` and ``G`` stand for activations.
        kwargs: keyword arguments.

    Raises:
        TypeError: the operation does not take the arguments, or returns nothing that could be an activation.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    count = math.prod(shape)
    x = draw(FEATURES)
    held = {"w": draw(count, FEATURES), "v": draw(count, FEATURES)}
    real = {H: (held["w"] @ x).reshape(shape), G: (held["v"] @ x).reshape(shape)}
    torch.manual_seed(0)
    filled, named = pytree.tree_map(
        lambda a: real[a].clone() if isinstance(a, str) and a in real else a, (args, kwargs)
    )
    overload, results = operand(name, filled, named)
    kept = [
        (i, leaf)
        for i, leaf in enumerate(results if isinstance(results, tuple | list) else [results])
        if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_complex() and bool(leaf.isfinite().all())
    ]
    if not kept:
        raise TypeError("no result that could be an activation")
    for i, leaf in kept:
        held[f"out{i}"] = draw(leaf.numel())
    graph = fx.Graph()
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    constants = {f"c{i}": leaf for i, leaf in enumerate(leaves)}
    nodes = {key: graph.placeholder(key) for key in (*held, "x", *constants)}
    places = {id(leaf): nodes[f"c{i}"] for i, leaf in enumerate(leaves)}
    env: dict[str, Any] = {}
    for key, weight in ((H, "w"), (G, "v")):
        flat = graph.call_function(aten.mv.default, (nodes[weight], nodes["x"]))
        env[key] = graph.call_function(aten.reshape.default, (flat, list(shape)))
    own_args, own_kwargs = pytree.tree_map(
        lambda a: env[a] if isinstance(a, str) and a in env else places.get(id(a), a), (args, kwargs)
    )
    result = graph.call_function(overload, own_args, own_kwargs)
    total: Any = None
    for i, leaf in kept:
        part = graph.call_function(operator.getitem, (result, i)) if isinstance(results, tuple | list) else result
        part = graph.call_function(aten.reshape.default, (part, [leaf.numel()]))
        if leaf.dtype != torch.float64:
            part = graph.call_function(aten._to_copy.default, (part,), {"dtype": torch.float64})
        part = graph.call_function(aten.mul.Tensor, (nodes[f"out{i}"], part))
        total = part if total is None else graph.call_function(aten.cat.default, ([total, part],))
    graph.output((total,))
    module = fx.GraphModule({}, graph)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = {key: mode.from_tensor(tensor) for key, tensor in (*held.items(), ("x", x), *constants.items())}
    shown: dict[fx.Node, Any] = {}
    with mode:
        for node in graph.nodes:
            if node.op == "placeholder":
                shown[node] = values[node.name]
            elif node.op == "call_function":
                inside = fx.node.map_arg((node.args, node.kwargs), shown.__getitem__)
                shown[node] = node.target(*inside[0], **inside[1])
            if node in shown:
                node.meta["val"] = shown[node]
    parameters = {key: torch.nn.Parameter(tensor) for key, tensor in held.items()}
    sources = (
        {key: ("parameter", key) for key in held} | {"x": ("input", "x")} | {c: ("constant", c) for c in constants}
    )
    return Net(Captured(module, sources, parameters, {key: key for key in held}, constants, {}), x)


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
    semantics.pin([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)], "everything")
    return pytree.tree_map(
        lambda leaf: torch.tensor(0).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf, semantics.place.result
    )


def violation(net: Net, graph: ReductionGraph) -> float:
    """How much the output changes under random rescalings, relative to its size."""
    before = net.run({})
    worst = 0.0
    for seed in (1, 2):
        phi = torch.randn(graph.num_units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        after = net.run(graph.gauge(phi))
        size = before.abs().max().clamp(min=1e-300)
        gap = (after - before).abs().max() / size
        worst = max(worst, float(gap.nan_to_num(nan=1.0)))
    return worst


Outcome = tuple[int, bool]


def outcome(net: Net, tolerance: float = 1e-8) -> tuple[Outcome, list[str]]:
    """Units, and whether they are symmetries; reasons of pins."""
    graph, reasons = net.trace()
    return (graph.num_units, violation(net, graph) < tolerance), reasons


__all__ = ["G", "H", "Net", "all_pinned", "copied", "network", "outcome", "violation"]
