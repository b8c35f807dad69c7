"""A residual model as a learnable Markov chain, whose nodes are found in the captured graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pathspace.capture.capture import capture
from pathspace.capture.captured import place
from pathspace.errors import UnsupportedError
from pathspace.models.inputs import arranged

from ..shared.real_tensors import is_real
from .addition_hooks import Addition, Kinds, Site, module_names
from .dataflow import is_float_node, is_seen, short
from .efficiency import ChainRecord, Watch, observe
from .nodes import ChainNode, Example, Nodes, run_noting
from .readout import readout
from .residual import Dismissed, Finder, Residual


@dataclass(frozen=True)
class MarkovChain(Nodes):
    """The chain of a model.

    Attributes:
        model: the model itself, unchanged.
        nodes: the chain nodes, in the order of execution.
        dismissed: additions and concatenations that are not chain nodes, with the reason.
        example: the example inputs, positional and by keyword.
        additions: the additions of each call of each module during the trace.
    """

    @classmethod
    def trace(
        cls, model: nn.Module, *inputs: Any, kwargs: Mapping[str, Any] | None = None
    ) -> MarkovChain:
        """Find the chain nodes of a model: its residual additions.

        An addition is a node if one operand is a value, unchanged or after an affine shortcut, from
        which the other operand is computed through learnable weights.

        Args:
            model: any model that can be captured; it is not changed.
            *inputs: positional example inputs.
            kwargs: keyword example inputs.

        Returns:
            The chain; ``len(chain)`` may be 0, and ``chain.sentence()`` then states the reason.

        Raises:
            InputTypeError: ``model`` is not a module.
            CaptureError: the model cannot be captured.
            UnsupportedError: the additions of the running model differ from those of its graph.

        Example:
            >>> import torch
            >>> class Block(nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.branch = nn.Linear(3, 3)
            ...
            ...     def forward(self, x):
            ...         return x + self.branch(x)
            >>> chain = MarkovChain.trace(nn.Sequential(Block(), Block()), torch.ones(2, 3))
            >>> [node.name for node in chain.nodes]
            ['0.branch', '1.branch']

        Reference:
            Learnable Markov chain paper, Definition 1.
        """
        # (the wrapper of torch.compile does not call hooks)
        model = getattr(model, "_orig_mod", model)
        example = arranged(model, inputs, kwargs)
        captured = capture(model, *example)
        finder = Finder(captured)
        sites, additions = _sites(model, finder, example)
        names: Counter[str] = Counter()
        nodes = []
        by_graph: dict[str, str] = {}
        for index, residual in enumerate(finder.found):
            direction = finder.graph.operand(residual.node, residual.direction)
            weights, producer = readout(finder.graph, direction)
            if short(residual.node) == "lerp":
                weights = ()  # (it takes a share of the stream away, too)
            name = _branch_name(residual, producer)
            names[name] += 1
            name = name if names[name] == 1 else f"{name}@{names[name]}"
            by_graph[residual.node.name] = name
            value = residual.node.meta["val"]
            module, source = place(residual.node)
            factor = residual.node.kwargs.get("alpha", 1)
            alpha = float(factor) if isinstance(factor, int | float) else 1.0
            nodes.append(
                ChainNode(
                    index=index,
                    name=name,
                    module=module,
                    kind=residual.kind,
                    direction=residual.direction,
                    scale=(alpha if residual.direction else 1.0)
                    * (-1 if short(residual.node).startswith("sub") else 1),
                    shape=tuple(value.shape),
                    in_place=short(residual.node).endswith("_"),
                    readout=weights,
                    encloses=tuple(
                        by_graph[inner] for inner in residual.encloses if inner in by_graph
                    ),
                    source=source,
                    site=sites[residual.node.name],
                )
            )
        return cls(model, tuple(nodes), tuple(finder.dismissed), example, additions)

    def observe(
        self, loss_fn: Callable[[Any, Any], Tensor], inputs: Any, targets: Any, **options: Any
    ) -> ChainRecord:
        """Measure the chain on a batch, see
        :func:`pathspace.diagnostics.chain.efficiency.observe`.
        """
        return observe(self, loss_fn, inputs, targets, **options)

    def watch(self, **options: Any) -> Watch:
        """Measure every step of a training loop; see
        :class:`pathspace.diagnostics.chain.efficiency.Watch`.
        """
        return Watch(self, **options)


def _branch_name(residual: Residual, producer: Any) -> str:
    """The module below the adding one that computes the direction, or the adding module itself."""

    def stack(node: Any) -> list[str]:
        return [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]

    outer, inner = stack(residual.node), stack(producer)
    for path in inner:
        if path not in outer and (not outer or not outer[-1] or path.startswith(outer[-1] + ".")):
            return path
    return (outer[-1] if outer else "") or short(residual.node)


def _sites(
    model: nn.Module, finder: Finder, example: Example
) -> tuple[dict[str, Site], dict[str, tuple[Kinds, ...]]]:
    """Match the additions of the graph with those of the running model,
    module by module, in order.
    """
    if not finder.found:
        return {}, {}
    additions: dict[str, list[Kinds]] = defaultdict(list)
    running: dict[str, list[tuple[Site, tuple[int, ...]]]] = defaultdict(list)

    def note(addition: Addition) -> Tensor:
        result = addition.run()
        running[addition.site.module].append((addition.site, tuple(result.shape)))
        return result

    run_noting(model, example, note, lambda name, kinds, _: additions[name].append(kinds))
    first = module_names(model)
    drawn: dict[str, list[Any]] = defaultdict(list)
    for node in finder.graph.nodes:
        if (
            node.op == "call_function"
            and short(node) in ("add", "add_", "sub", "sub_", "lerp")
            and is_seen(node)
        ):
            operands = [a for a in (*node.args[:2], *node.kwargs.values()) if is_float_node(a)]
            if len(operands) == 2 and node.meta["val"].ndim:
                module = place(node)[0]
                drawn[first.get(module, module)].append(node)
    if any(len(running[module]) > len(nodes) for module, nodes in drawn.items()):
        # (a capture leaves out what no output depends on)
        read = _read(model, example)
        running = {
            name: [pair for pair in pairs if pair[0] in read] for name, pairs in running.items()
        }
    sites: dict[str, Site] = {}
    for residual in finder.found:
        module, source = place(residual.node)
        module = first.get(module, module)
        both = list(zip(drawn[module], running.get(module, ()), strict=False))
        same = len(drawn[module]) == len(running.get(module, ()))
        if not same or any(tuple(node.meta["val"].shape) != shape for node, (_, shape) in both):
            compiled = any("_orig_mod" in inner._modules for inner in model.modules())
            moment = (
                "before its blocks are compiled" if compiled else "in the mode in which it will run"
            )
            raise UnsupportedError(
                f"{type(model).__name__} makes {len(running.get(module, ()))} additions in module"
                f" {module!r} ({source}) when it runs and {len(drawn[module])} when it is"
                f" captured; trace it {moment}."
            )
        sites[residual.node.name] = next(site for node, (site, _) in both if node is residual.node)
    return sites, {name: tuple(calls) for name, calls in additions.items()}


def _read(model: nn.Module, example: Example) -> set[Site]:
    """The additions on which some output of the running model depends."""
    made: dict[Any, Site] = {}

    def note(addition: Addition) -> Tensor:
        result = addition.run()
        made[result.grad_fn] = addition.site
        return result

    def sensitive(value: Any) -> Any:
        # (not a leaf, so that the model may overwrite it)
        return value.detach().requires_grad_().clone() if is_real(value) else value

    args, kwargs = tree_map(sensitive, example)
    output = run_noting(model, (args, kwargs), note, gradients=True)
    waiting: list[Any] = [v.grad_fn for v in tree_leaves(output) if isinstance(v, Tensor)]
    seen: set[Any] = {None}
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += [before for before, _ in each.next_functions]
    return {site for step, site in made.items() if step in seen and step is not None}


__all__ = ["ChainNode", "Dismissed", "MarkovChain"]
