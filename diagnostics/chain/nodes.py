"""The nodes of a learnable Markov chain as data, and runs of the model
that record its additions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.models.isolation import quiet
from pathspace.models.values import require_runnable
from pathspace.shown import Shown

from ..shared.sample_rows import Example, Samples, batch_size, doubled, grown_dim, in_order
from ..shared.unchanged import unchanged
from ..shared.wording import plural
from .addition_hooks import Addition, End, Kinds, Site, Sites
from .residual import Dismissed

Place = tuple[str, int]  # a module, and the number of an addition in its calls


@dataclass(frozen=True)
class ChainNode:
    """One residual addition ``x_l = x_{l-1} + z_l``.

    Attributes:
        index: position in the chain, from 0.
        name: the module that computes the predicted direction ``z_l``.
        module: the module whose ``forward`` makes the addition.
        kind: ``"identity"`` (the stream is ``x_{l-1}`` itself), ``"shortcut"`` (the stream is
            the output of an affine down-sampling shortcut), ``"parallel"`` (added to the same
            stream as the previous node).
        direction: which operand of the addition is the direction, 0 or 1.
        scale: ``z_l = scale * operand``, for ``torch.add(..., alpha=)`` and subtractions.
        shape: shape of ``x_l`` on the example inputs.
        in_place: whether the addition overwrites one of its operands.
        readout: parameters of the branch's last layers, in which ``z_l`` is jointly linear; empty
            if they are also used elsewhere.
        encloses: names of the nodes inside this node's branch.
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

    @property
    def role(self) -> tuple[int, float, int]:
        """What must be known of a node to penalise an addition."""
        return self.direction, self.scale, len(self.shape)

    def split(self, addition: Addition) -> tuple[Tensor, Tensor]:
        """The stream and the direction among the operands of an addition at this node."""
        pair = (addition.left, addition.right)
        return pair[1 - self.direction], pair[self.direction]


@dataclass(frozen=True)
class Nodes(Shown):
    """The residual additions of a model, in the order of execution.

    Attributes:
        model: the model itself, unchanged.
        nodes: the chain nodes, in the order of execution.
        dismissed: additions and concatenations that are not chain nodes, with the reason.
        example: the example inputs, positional and by keyword.
        additions: the additions of each call of each module during the trace.
    """

    model: nn.Module = field(repr=False)
    nodes: tuple[ChainNode, ...]
    dismissed: tuple[Dismissed, ...]
    example: Example = field(repr=False)
    additions: Mapping[str, tuple[Kinds, ...]] = field(repr=False, default_factory=dict)
    # dimension of the samples in the inputs -> where they are at the nodes
    _samples: dict[int, tuple[Samples, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __len__(self) -> int:
        return len(self.nodes)

    def sentence(self) -> str:
        """The chain in one sentence.

        Example:
            >>> from pathspace.diagnostics import MarkovChain
            >>> MarkovChain.trace(nn.Linear(2, 2), torch.ones(1, 2)).sentence()
            'Linear is not a Markov chain: no addition joins a stream and a branch computed from it.'
        """  # noqa: E501
        name = type(self.model).__name__
        if self.nodes:
            kinds = Counter(node.kind for node in self.nodes)
            parts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            return f"{name} is a Markov chain of {plural(len(self.nodes), 'node')} ({parts})."
        joins = sum(item.operation == "cat" for item in self.dismissed)
        joined = (
            f"it joins features by concatenation ({plural(joins, 'time')}), and " if joins else ""
        )
        if joins and joins == len(self.dismissed):
            return f"{name} is not a Markov chain: {joined}adds none."
        return (
            f"{name} is not a Markov chain: {joined}no addition joins a stream and a branch"
            " computed from it."
        )

    def by_site(self) -> dict[Site, ChainNode]:
        """The node at each site of the running model."""
        return {node.site: node for node in self.nodes}

    def by_place(self) -> dict[Place, tuple[ChainNode, ...]]:
        """The nodes at each addition in the code of a module, one for each call of the module."""
        places: dict[Place, tuple[ChainNode, ...]] = {}
        for node in self.nodes:
            places[node.site.place] = (*places.get(node.site.place, ()), node)
        return places

    def calls_at(self, place: Place) -> int:
        """In how many calls of its module an addition happened during the trace."""
        module, order = place
        return sum(order < len(kinds) for kinds in self.additions.get(module, ()))

    def differing(self) -> frozenset[Place]:
        """Additions whose role depends on the call: some calls make no node there, or other nodes.

        A module that is used at several places may add the direction to the stream here, the
        stream to the direction there, and elsewhere two values of which none is a direction.
        """
        return frozenset(
            place
            for place, nodes in self.by_place().items()
            if len(nodes) != self.calls_at(place) or len({node.role for node in nodes}) > 1
        )

    def samples(self, batch_dim: int = 0) -> tuple[Samples, ...]:
        """Where the samples are in every node's ``x_l``, found once, by a run of the
        model on a doubled batch, and by more if a dimension merges the samples with others.

        Args:
            batch_dim: the dimension of the samples in the inputs.
        """
        if batch_dim not in self._samples:
            self._samples[batch_dim] = self._find_samples(batch_dim)
        return self._samples[batch_dim]

    def _find_samples(self, batch_dim: int) -> tuple[Samples, ...]:
        size, twice = batch_size(self.example, batch_dim), doubled(self.example, batch_dim)
        shapes = self._shown(twice)
        dims = [
            grown_dim(node.shape, shapes[node.index].shape if node.index in shapes else ())
            for node in self.nodes
        ]
        merged = [
            node.index
            for node, dim in zip(self.nodes, dims, strict=True)
            if dim is not None and node.shape[dim] > size
        ]
        one, two = (self._shown(each, merged) if merged else {} for each in (self.example, twice))
        return tuple(
            in_order(dim, one[index], two[index], size)
            if index in merged and dim is not None and index in one and index in two
            else Samples(
                min(batch_dim, max(len(self.nodes[index].shape) - 1, 0)) if dim is None else dim
            )
            for index, dim in enumerate(dims)
        )

    def _shown(self, example: Example, kept: Collection[int] = ()) -> dict[int, Tensor]:
        """The states ``x_l`` in a run; only the shapes of those that are not kept."""
        known, shown = self.by_site(), {}

        def note(addition: Addition) -> Tensor:
            result = addition.run()
            if addition.site in known:
                index = known[addition.site].index
                shown[index] = result.clone() if index in kept else result.to("meta")
            return result

        try:
            run_noting(self.model, example, note)
        except Exception:
            return {}
        return shown


def run_noting(
    model: nn.Module,
    example: Example,
    handler: Any,
    end: End | None = None,
    gradients: bool = False,
) -> Any:
    """Run a model on its example inputs, without gradients unless they are asked for, and pass
    every addition to ``handler``.
    """
    require_runnable("the Markov chain", model.named_parameters())
    followed = Sites(handler, end=end).following(model)
    with unchanged(model), quiet(), torch.set_grad_enabled(gradients), followed:
        return model(*example[0], **example[1])


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """A context in which the wrappers of ``torch.compile``, which are not modules
    of the model, are removed.
    """
    held = [
        (m, name, part)
        for m in model.modules()
        for name, part in m._modules.items()
        if _inside(part) is not None
    ]
    for parent, name, part in held:
        parent._modules[name] = _inside(part)
    try:
        yield
    finally:
        for parent, name, part in held:
            parent._modules[name] = part


def _inside(module: nn.Module | None) -> nn.Module | None:
    return None if module is None else module._modules.get("_orig_mod")


__all__ = ["ChainNode", "Example", "Nodes", "batch_size", "run_noting", "unwrapped"]
