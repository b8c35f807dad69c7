"""Is what the analysis says about a model true? Measured in float64 on the captured
graph, and by an exact oracle.

The captured graph is run instead of the model, so that every cast to a lower precision can be
lifted and every `eps` of a normalisation be set to (next to) nothing, wherever it is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import pathspace as ps
from pathspace.capture.capture import capture
from pathspace.inference.interpreter import interpret
from pathspace.inference.scales import Scales
from pathspace.inference.units import build_graph
from pathspace.models.nested import is_plain, leaves

SMALL = torch.finfo(torch.float64).tiny
LOW = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
       torch.complex64: torch.complex128}  # fmt: skip
EPS = (
    "layer_norm native_layer_norm batch_norm group_norm instance_norm rms_norm cosine_similarity"
    " _native_batch_norm_legit _native_batch_norm_legit_no_training native_group_norm"
    " _native_batch_norm_legit_functional"
).split()


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """In place: float64, and weights of ordinary size, so that no defect hides behind a zero."""
    model = model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                fan = max(1, min(parameter[0].numel(), parameter.numel() // parameter.shape[-1]))
                parameter.copy_(noise * (1.5 / fan) ** 0.5)
            else:
                parameter.copy_(0.7 + 0.4 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.3, generator=generator)
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5, generator=generator)
    return model


class Exact(fx.Interpreter):
    """Run a captured graph in float64 with every `eps` next to 0."""

    def __init__(self, module: fx.GraphModule, negligible: frozenset[str] = frozenset()) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.negligible = negligible

    def run_node(self, n: fx.Node) -> Any:
        with self._set_current_node(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            args, kwargs = pytree.tree_map(lambda leaf: LOW.get(leaf, leaf), (args, dict(kwargs)))
            if n.op == "get_attr":
                value = self.fetch_attr(str(n.target))
                return value.double() if isinstance(value, Tensor) and value.dtype in LOW else value
            if n.op == "call_function":
                args, kwargs = self._without_eps(n, list(args), kwargs)
                replaced = self._differentiable(n, args)
                if replaced is not None:
                    return replaced
                nested = next((arg for arg in args if isinstance(arg, fx.GraphModule)), None)
                if nested is not None and str(n.target).startswith("wrap"):
                    # (regions without gradients too: they are part of the function)
                    return Exact(nested, self.negligible).run(*args[args.index(nested) + 1 :])
            return getattr(self, n.op)(n.target, tuple(args), kwargs)

    def _differentiable(self, n: fx.Node, args: list[Any]) -> Tensor | None:
        """Operations without a derivative by all their operands, written differently."""
        name = str(getattr(n.target, "overloadpacket", ""))
        if name == "aten.batch_norm" and not args[5]:
            x, weight, bias, mean, var = args[:5]
            shape = [1, -1, *[1] * (x.dim() - 2)]
            out = (x - mean.reshape(shape)) / var.reshape(shape).sqrt()
            out = out if weight is None else out * weight.reshape(shape)
            return out if bias is None else out + bias.reshape(shape)
        if name == "aten.detach":
            return args[0]
        if name == "aten.copy":
            return args[1].to(args[0].dtype).expand(args[0].shape)
        if name in ("aten.view", "aten._unsafe_view") and isinstance(args[1], list | tuple):
            return args[0].reshape(args[1])
        return None

    def _without_eps(
        self, n: fx.Node, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        if n.name in self.negligible:
            args = [0.0 if i and isinstance(arg, float) else arg for i, arg in enumerate(args)]
        schema = getattr(n.target, "_schema", None)
        if schema is None or schema.name.split("::")[-1] not in EPS:
            return args, kwargs
        names = [argument.name for argument in schema.arguments]
        if "eps" in names[: len(args)]:
            args[names.index("eps")] = SMALL
        elif "eps" in names:
            kwargs["eps"] = SMALL
        return args, kwargs


def _is_statistic(node: Any) -> bool:
    """Whether an output is a running mean or variance, which follow the scales."""
    source = node.args[0] if isinstance(node, fx.Node) and node.args else None
    return (
        isinstance(source, fx.Node)
        and "_native_batch_norm_legit_functional" in str(source.target)
        and node.args[1] in (3, 4)  # type: ignore[union-attr]
    )


class Runner:
    """The function of a traced model: weights (and buffers) in, flat outputs out.

    Args:
        graph: the reduction graph, which holds the captured graph.
        model: the float64 model that was traced.
        inputs: example inputs, positional and by keyword.
        negligible: nodes whose small constant the analysis took for an `eps`.
    """

    def __init__(
        self,
        graph: ps.ReductionGraph,
        model: nn.Module,
        inputs: tuple[Any, dict[str, Any]],
        negligible: frozenset[str] = frozenset(),
    ) -> None:
        self.graph, captured = graph, graph.captured
        self.module = captured.graph
        self.sources, self.constants = captured.sources, captured.constants
        self.weights = {name: p.detach() for name, p in captured.parameters.items()}
        self.buffers = {name: b.detach() for name, b in model.named_buffers(remove_duplicate=False)}
        self.negligible = negligible
        # (of inputs in objects, a tensor that is met twice is one input)
        given = (tuple(inputs[0]), dict(inputs[1]))
        once = {id(leaf): leaf for leaf in leaves(given)}
        self.inputs = pytree.tree_leaves(given) if is_plain(given) else list(once.values())
        self.training = model.training
        self.results = pytree.tree_leaves(
            next(n for n in self.module.graph.nodes if n.op == "output").args[0]
        )

    def __call__(
        self, tensors: Mapping[str, Tensor], inputs: list[Any] | None = None, seed: int = 0
    ) -> Tensor:
        values = iter(self.inputs if inputs is None else inputs)
        feed = []
        for node in self.module.graph.nodes:
            if node.op != "placeholder":
                break
            kind, name = self.sources.get(node.name, ("input", node.name))
            if node.name in self.constants:
                value = self.constants[node.name]
                feed.append(value.double() if value.dtype in LOW else value.clone())
            elif kind == "parameter":
                feed.append(tensors.get(name, self.weights.get(name)))
            elif kind == "buffer":
                # (a tensor that is not among the model's buffers is a constant of another kind)
                feed.append(tensors.get(name, self.buffers[name]).clone())
            else:
                feed.append(next(values))
        torch.manual_seed(seed)
        outputs = Exact(self.module, self.negligible).run(*feed)
        pairs = zip(pytree.tree_leaves(outputs), self.results, strict=True)
        written = self.graph.captured.written
        leaves = [
            leaf
            for number, (leaf, node) in enumerate(pairs)
            if isinstance(leaf, Tensor) and not _is_statistic(node) and number not in written
        ]
        leaves = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
        return torch.cat([leaf.reshape(-1) for leaf in leaves if leaf.is_floating_point()])

    def moving(self) -> dict[str, Tensor]:
        """Everything a gauge may move: parameters, and in eval mode the running statistics."""
        statistics = () if self.training else self.graph.statistics
        wanted = {name for s in statistics for name in (s.mean, s.var) if name}
        return dict(self.weights) | {name: self.buffers[name] for name in wanted}


def trace_double(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ps.ReductionGraph, Runner]:
    """Trace a float64 model, and make its runner."""
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.dtype in LOW else leaf,
        (args, kwargs),
    )
    captured = computing(lambda: capture(model, args, kwargs))
    scales, _ = interpret(captured, Scales)
    graph = build_graph(captured, scales)
    return graph, Runner(graph, model, (args, kwargs), frozenset(scales.negligible))


def computing(function: Callable[[], Any]) -> Any:
    """Call with float64 as the default type and the global random state kept."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            return function()
    finally:
        torch.set_default_dtype(default)


def gradients(runner: Runner, seed: int = 1) -> dict[str, Tensor]:
    """Gradients of a random linear function of the outputs."""
    leaves = {
        n: t.clone().requires_grad_(t.is_floating_point()) for n, t in runner.moving().items()
    }

    def back() -> dict[str, Tensor]:
        outputs = runner(leaves)
        if not outputs.requires_grad:
            return {}
        weights = torch.randn(
            outputs.shape, generator=torch.Generator().manual_seed(seed), dtype=outputs.dtype
        )
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        found = torch.autograd.grad(
            (outputs * weights).sum(), [leaves[name] for name in names], allow_unused=True
        )
        return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}

    return computing(back)


def added(graph: ps.ReductionGraph, name: str) -> float:
    """What a model adds to a parameter (norms run without the eps that they add to a variance)."""
    return graph.shifts.get(name, 0.0) if name in graph.index else 0.0


def unbalanced(graph: ps.ReductionGraph, runner: Runner) -> float:
    """Largest `|sum_in w g - sum_out w g|` over the units, relative to `sum |w g|`
    where that exceeds rounding.
    """
    weights, grads = runner.moving(), gradients(runner)
    net = torch.zeros(graph.expand.shape[0], dtype=torch.float64)
    size = torch.zeros_like(net)
    ends = [(block.name, block.head, block.tail, 1) for block in graph.blocks]
    for statistic in graph.statistics:
        ends += [(n, statistic.units, torch.zeros(1, dtype=torch.long), k) for n,
                 k in ((statistic.mean, 1), (statistic.var, 2)) if n]  # fmt: skip
    for name, head, tail, factor in ends:
        if name not in grads:
            continue
        product = factor * (weights[name] + added(graph, name)) * grads[name]
        for ids, sign in ((head, 1), (tail, -1)):
            flat = ids.expand(product.shape).reshape(-1)
            net.index_add_(0, flat.abs(), product.reshape(-1) * flat.sign() * sign)
            size.index_add_(0, flat.abs(), product.reshape(-1).abs())
    net, size = (
        torch.from_numpy(m.T @ v.numpy())[1:]
        for m, v in ((graph.expand, net), (abs(graph.expand), size))
    )
    kept = size > 1e-9 * size.max() if len(size) else size > 0
    return float((net.abs() / size)[kept].max()) if bool(kept.any()) else 0.0


def rescaled(graph: ps.ReductionGraph, runner: Runner, seed: int = 0) -> float:
    """Largest relative change of the outputs by a random rescaling by powers of two to 4096."""
    factors = graph.gauge_factors(ps.ReductionGraph.random_powers(graph, seed))
    moved = dict(runner.moving())
    for name in moved.keys() & factors.keys():
        (head, tail) = (factor.to(moved[name]) for factor in factors[name])
        constant = added(graph, name)
        moved[name] = (moved[name] + constant) * head / tail - constant
    with torch.no_grad():
        before, after = computing(lambda: runner({})), computing(lambda: runner(moved))
    finite = torch.isfinite(before)
    if not torch.equal(finite, torch.isfinite(after)):
        return math.inf
    before, after = before[finite], after[finite]
    size = float(before.abs().max()) if len(before) else 0.0
    return float((before - after).abs().max()) / (size or 1.0) if len(before) else 0.0


def redrawn(leaf: Any, generator: torch.Generator) -> Any:
    """Another random input like the given one."""
    if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool or leaf.numel() == 0:
        return leaf
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
    return torch.randint(
        int(leaf.min()), int(leaf.max()) + 1, leaf.shape, generator=generator, dtype=leaf.dtype
    )


def scaling_dimension(
    runner: Runner,
    seed: int = 0,
    rows: int = 8,
    surplus: float = 1.5,
    sizes: tuple[float, ...] = (0.4, 1.0, 2.5),
) -> tuple[int, int]:
    """The number of independent rescalings of single weights that leave the function
    alone, found numerically.

    A generator `d` (one number for each scalar) is a symmetry iff `sum_e d_e w_e df/dw_e = 0`
    for ALL weights `w` and inputs; so `d` spans the kernel of the stacked matrices `J(w)
    diag(w)` over many random `w`.

    Args:
        runner: a small model.
        seed: seed of all draws.
        rows: random functions of the outputs for each random weight.
        surplus: rows for each column.
        sizes: standard deviations of the random weights, in turn.

    Returns:
        Dimension of the kernel on the scalars that matter, and how many scalars matter.
    """
    tensors = runner.moving()
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    width = sum(tensors[name].numel() for name in names)
    generator = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    draw = 0
    while sum(map(len, parts)) < surplus * width + 20:
        # small and large weights, so that every function is met where it bends
        size = sizes[draw % len(sizes)]
        leaves = {}
        for name in names:
            noise = size * torch.randn(
                tensors[name].shape, generator=generator, dtype=torch.float64
            )
            if name in runner.buffers and "var" in name:
                noise = noise.abs() + 0.3
            elif draw % 2 and tensors[name].dim() > 1:
                noise = noise.abs() * 0.5 + 0.05
            leaves[name] = noise.requires_grad_()
        inputs = [redrawn(leaf, generator) for leaf in runner.inputs]

        def derivative(leaves: Any = leaves, inputs: Any = inputs, draw: int = draw) -> Tensor:
            outputs = runner(leaves, inputs, seed=draw)
            count = min(rows, len(outputs))
            weights = [
                torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
                for _ in range(count)
            ]
            own = [leaves[n] for n in names]
            options = {"allow_unused": True, "is_grads_batched": True}
            grads = torch.autograd.grad(outputs, own, torch.stack(weights), **options)
            flat = [
                torch.zeros(count, leaves[n].numel(), dtype=torch.float64)
                if g is None
                else (g * (leaves[n] + added(runner.graph, n))).reshape(count, -1)
                for n, g in zip(names, grads, strict=True)
            ]
            return torch.cat(flat, 1).detach()

        parts.append(computing(derivative))
        draw += 1
    matrix = torch.cat(parts)
    matrix = matrix[torch.isfinite(matrix).all(1)]
    matrix = matrix / matrix.norm(dim=1, keepdim=True).clamp_min(1e-300)
    length = matrix.norm(dim=0)
    matrix = matrix[:, length > 1e-9 * length.max()]
    singular = torch.linalg.svdvals(matrix / matrix.norm(dim=0))
    rank = int((singular > 1e-8 * singular[0]).sum()) if len(singular) else 0
    return matrix.shape[1] - rank, matrix.shape[1]
