"""A residual-like model read as a learnable Markov chain: its nodes, found in the captured graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pathspace.capture import capture, place, quiet
from pathspace.diagnostics.addition_hooks import Addition, End, Kinds, Site, Sites, module_names
from pathspace.diagnostics.dataflow import is_float, is_seen, short
from pathspace.diagnostics.residual import Dismissed, Finder, Residual
from pathspace.errors import InputTypeError, UnsupportedError
from pathspace.inputs import arranged

if TYPE_CHECKING:
    from pathspace.diagnostics.efficiency import ChainRecord, Watch


@dataclass(frozen=True)
class ChainNode:
    """One residual addition ``x_l = x_{l-1} + z_l``.

    Attributes:
        index: position in the chain, from 0.
        name: the module that computes the predicted direction ``z_l``.
        module: the module whose ``forward`` makes the addition.
        kind: ``"identity"`` (the stream is ``x_{l-1}`` itself), ``"shortcut"`` (the stream is the output of an affine
            down-sampling shortcut), ``"parallel"`` (added to the same stream beside the node before).
        direction: which operand of the addition is the direction, 0 or 1.
        scale: ``z_l = scale * operand``, for ``torch.add(..., alpha=)`` and subtractions.
        shape: shape of ``x_l`` on the example inputs.
        in_place: whether the addition overwrites one of its operands.
        readout: parameters of the branch's last layers, jointly linear in ``z_l``; empty where they serve elsewhere
            too.
        encloses: names of the nodes inside this one's branch.
        source: file and line.
        site: where the addition happens in the running model.
    """

    index: int
    name: str
    module: str
    kind: str
    direction: int
    scale: float
    shape: tuple[int, ...]
    in_place: bool
    readout: tuple[str, ...]
    encloses: tuple[str, ...]
    source: str
    site: Site

    def split(self, addition: Addition) -> tuple[Tensor, Tensor]:
        """The stream and the operand that carries the direction, of this node's running addition."""
        pair = (addition.left, addition.right)
        return pair[1 - self.direction], pair[self.direction]


@dataclass(frozen=True)
class MarkovChain:
    """The chain of a model.

    Attributes:
        model: the model, untouched.
        nodes: the chain nodes, in the order of execution.
        dismissed: additions and concatenations that are no chain node, with the reason.
        example: the example inputs, positional and by keyword.
        additions: what the calls of each module added while the chain was traced.
    """

    model: nn.Module = field(repr=False)
    nodes: tuple[ChainNode, ...]
    dismissed: tuple[Dismissed, ...]
    example: tuple[tuple[Any, ...], dict[str, Any]] = field(repr=False)
    additions: Mapping[str, frozenset[Kinds]] = field(repr=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self.nodes)

    @classmethod
    def trace(cls, model: nn.Module, *inputs: Any, kwargs: Mapping[str, Any] | None = None) -> MarkovChain:
        """Find the chain nodes of a model: its residual additions.

        An addition is a node if one operand is carried to it unchanged (or by an affine shortcut) from a value from
        which the other one is computed through learnable weights.

        Args:
            model: any model that can be captured; it is left as it is.
            *inputs: positional example inputs.
            kwargs: keyword example inputs.

        Returns:
            The chain; ``len(chain)`` may be 0, and ``chain.sentence()`` says why.

        Raises:
            InputTypeError: ``model`` is not a module.
            CaptureError: the model cannot be captured.
            UnsupportedError: the running model does not make the additions that its graph shows.

        Example:
            >>> class Block(nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.branch = nn.Linear(3, 3)
            ...     def forward(self, x):
            ...         return x + self.branch(x)
            >>> chain = MarkovChain.trace(nn.Sequential(Block(), Block()), torch.ones(2, 3))
            >>> [node.name for node in chain.nodes]
            ['0.branch', '1.branch']

        Reference:
            Learnable Markov chain paper, Definition 1.
        """
        example = arranged(model, inputs, kwargs)
        captured = capture(model, *example)
        finder = Finder(captured)
        sites, additions = _sites(model, finder, example)
        names: Counter[str] = Counter()
        nodes = []
        by_graph: dict[str, str] = {}
        for index, residual in enumerate(finder.found):
            readout, producer = finder.readout(residual)
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
                    readout=readout,
                    encloses=tuple(by_graph[inner] for inner in residual.encloses if inner in by_graph),
                    source=source,
                    site=sites[residual.node.name],
                )
            )
        return cls(model, tuple(nodes), tuple(finder.dismissed), example, additions)

    def sentence(self) -> str:
        """What was found, in one sentence.

        Example:
            >>> MarkovChain.trace(nn.Linear(2, 2), torch.ones(1, 2)).sentence()
            'Linear is no Markov chain: no addition joins a stream and a branch computed from it.'
        """
        name = type(self.model).__name__
        if self.nodes:
            kinds = Counter(node.kind for node in self.nodes)
            parts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            return f"{name} is a Markov chain of {_counted(len(self.nodes), 'node')} ({parts})."
        joins = sum(item.operation == "cat" for item in self.dismissed)
        joined = f"it joins features by concatenation ({_counted(joins, 'time')}), and " if joins else ""
        if joins and joins == len(self.dismissed):
            return f"{name} is no Markov chain: {joined}adds none."
        return f"{name} is no Markov chain: {joined}no addition joins a stream and a branch computed from it."

    def by_site(self) -> dict[Site, ChainNode]:
        """The node at each place of the running model."""
        return {node.site: node for node in self.nodes}

    def observe(self, loss_fn: Callable[[Any, Any], Tensor], inputs: Any, targets: Any, **options: Any) -> ChainRecord:
        """Measure the chain on a batch; see :func:`pathspace.diagnostics.efficiency.observe`."""
        from pathspace.diagnostics.efficiency import observe

        return observe(self, loss_fn, inputs, targets, **options)

    def watch(self, **options: Any) -> Watch:
        """Measure every step of a training loop; see :class:`pathspace.diagnostics.efficiency.Watch`."""
        from pathspace.diagnostics.efficiency import Watch

        return Watch(self, **options)

    def batch_dims(self, batch_dim: int = 0) -> tuple[int, ...]:
        """Which dimension of every node's ``x_l`` holds the samples, found by running the model on a doubled batch.

        Args:
            batch_dim: the dimension of the inputs that holds the samples.
        """
        double = _doubled(self.example, batch_dim)
        known = self.by_site()
        shapes: dict[int, tuple[int, ...]] = {}

        def note(addition: Addition) -> Tensor:
            result = addition.run()
            if addition.site in known:
                shapes[known[addition.site].index] = tuple(result.shape)
            return result

        try:
            _run(self.model, double, note)
        except Exception:
            shapes = {}
        dims = []
        for node in self.nodes:
            pairs = list(zip(node.shape, shapes.get(node.index, ()), strict=False))
            grown = [dim for dim, (old, new) in enumerate(pairs) if new == 2 * old]
            dims.append(grown[0] if len(grown) == 1 else min(batch_dim, max(len(node.shape) - 1, 0)))
        return tuple(dims)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _branch_name(residual: Residual, producer: Any) -> str:
    """The module below the adding one in which the direction is made, or the adding module itself."""

    def stack(node: Any) -> list[str]:
        return [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]

    outer, inner = stack(residual.node), stack(producer)
    for path in inner:
        if path not in outer and (not outer or not outer[-1] or path.startswith(outer[-1] + ".")):
            return path
    return (outer[-1] if outer else "") or short(residual.node)


def _batch(example: tuple[tuple[Any, ...], dict[str, Any]], dim: int = 0) -> int:
    """The number of samples: the size of the first tensor in their dimension."""
    for value in (*example[0], *example[1].values()):
        if isinstance(value, Tensor) and value.ndim > dim:
            return int(value.shape[dim])
    raise InputTypeError(
        f"The model has no tensor with a dimension {dim} among its inputs, so there are no samples to tell apart; pass "
        "one, or another batch_dim."
    )


def _doubled(example: tuple[tuple[Any, ...], dict[str, Any]], dim: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    size = _batch(example, dim)

    def twice(value: Any) -> Any:
        held = isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == size
        return torch.cat([value, value], dim) if held else value

    return tuple(map(twice, example[0])), {key: twice(value) for key, value in example[1].items()}


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Run a model without a trace: its buffers, such as running statistics, are put back."""
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with quiet(), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)


def _run(
    model: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]], handler: Any, end: End | None = None
) -> Any:
    with _buffers_kept(model), Sites(handler, end=end).following(model):
        return model(*example[0], **example[1])


def _sites(
    model: nn.Module, finder: Finder, example: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[dict[str, Site], dict[str, frozenset[Kinds]]]:
    """Match the graph's additions with those of the running model, module by module, in order."""
    if not finder.found:
        return {}, {}
    additions: dict[str, set[Kinds]] = defaultdict(set)
    running: dict[str, list[tuple[Site, tuple[int, ...]]]] = defaultdict(list)

    def note(addition: Addition) -> Tensor:
        result = addition.run()
        running[addition.site.module].append((addition.site, tuple(result.shape)))
        return result

    _run(model, example, note, lambda name, kinds: additions[name].add(kinds))
    first = module_names(model)
    drawn: dict[str, list[Any]] = defaultdict(list)
    for node in finder.graph.nodes:
        if node.op == "call_function" and short(node) in ("add", "add_", "sub", "sub_") and is_seen(node):
            operands = [a for a in (*node.args, *node.kwargs.values()) if is_float(a)]
            if len(operands) == 2 and node.meta["val"].ndim:
                module = place(node)[0]
                drawn[first.get(module, module)].append(node)
    sites: dict[str, Site] = {}
    for residual in finder.found:
        module, source = place(residual.node)
        module = first.get(module, module)
        both = list(zip(drawn[module], running[module], strict=False))
        same = len(drawn[module]) == len(running[module])
        if not same or any(tuple(node.meta["val"].shape) != shape for node, (_, shape) in both):
            raise UnsupportedError(
                f"{type(model).__name__} makes {len(running[module])} additions in module {module!r} ({source}) when "
                f"it runs and {len(drawn[module])} when it is captured; trace it in the mode in which it will run."
            )
        sites[residual.node.name] = next(site for node, (site, _) in both if node is residual.node)
    return sites, {name: frozenset(kinds) for name, kinds in additions.items()}


__all__ = ["ChainNode", "Dismissed", "MarkovChain"]
