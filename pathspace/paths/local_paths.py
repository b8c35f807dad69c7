"""The paths through one operation, read from its rule: for operations of which
the table does not say more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..inference.registry import RULES
from ..inference.semantics import Place, as_stored
from ..inference.unrolled import PRODUCT, START, Arrivals, Unrolled
from ..inference.values import NEUTRAL, ROOT, Value, Weight, constant, shape_of, with_value
from .path_sums import Sum, absolute_power, is_float_tensor

LEAF = -3


class _Nodes(Sequence[Arrivals]):
    """Ways to arrive: at the root, at every element that enters (written down nowhere), and
    at what is made of them.
    """

    def __init__(self, entering: int) -> None:
        self.entering = entering
        self.made: list[Arrivals] = [frozenset({(START, ROOT)})]

    def __len__(self) -> int:
        return self.entering + len(self.made)

    def __getitem__(self, node: Any) -> Any:
        if 0 < node <= self.entering:
            return frozenset({(LEAF, node)})
        return self.made[max(node - self.entering, 0)]

    def append(self, arrivals: Arrivals) -> None:
        self.made.append(arrivals)


class LocalPaths(Unrolled):
    """The unrolled network of one operation: every element that enters is a node of its own.

    Attributes:
        ended: ids of elements whose scale the operation fixes, as often as it does.
        restarts: whether paths start again, or follow a sign or an order alone.
    """

    def __init__(self, weights: dict[str, Tensor], count: int) -> None:
        offsets, total = {}, 0
        for name, weight in weights.items():
            offsets[name], total = total, total + weight.numel()
        super().__init__(offsets, {name: tuple(weight.shape) for name, weight in weights.items()})
        self.arrivals = _Nodes(count)  # type: ignore[assignment]
        self.ended: list[Tensor] = []
        self.restarts = False

    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> None:
        """Data may choose any row at any position."""

    def cut(self, value: Value, dims: Sequence[int], exact: bool = False) -> Tensor:
        """Paths start again behind a normalisation."""
        self.restarts = True
        return super().cut(value, dims, exact)

    def observe(self, value: Tensor) -> Tensor:
        """Paths start again where only a sign is used."""
        self.restarts = self.restarts or bool(((value != ROOT) & (value != NEUTRAL)).any())
        return super().observe(value)

    def fix(self, value: Tensor) -> None:
        """Paths end here, at every element."""
        super().fix(value)
        self.ended.append(value)

    def logs(self, entering: Tensor, weights: Tensor, start: float = 0.0) -> Tensor:
        """Logarithms of the sums over paths to every node.

        Args:
            entering: logarithms of the sums of the elements that enter.
            weights: logarithms of the powers of the weights.
            start: logarithm of the value with which paths start inside the operation.
        """
        # (numbers take far less time than tensors, which have gradients)
        differentiable = entering.requires_grad or weights.requires_grad
        first = torch.tensor([start], dtype=torch.float64)
        found, edges = (
            list(ends.unbind()) if differentiable else ends.tolist()
            for ends in (torch.cat([first, entering]), weights)
        )
        nodes: Any = self.arrivals
        for arrivals in nodes.made[1:]:
            ways = [self._way(found, edges, edge, before) for edge, before in arrivals]
            found.append(_log_sum(ways, differentiable))
        return torch.stack(found) if differentiable else torch.tensor(found, dtype=torch.float64)

    def _way(self, found: list[Any], edges: list[Any], edge: int, before: int) -> Any:
        if edge == START:
            return found[ROOT]
        if edge == PRODUCT:
            return sum(found[node] for node in self.pairs[before])
        return found[before] if edge == LEAF else edges[edge] + found[before]


@dataclass(frozen=True)
class Read:
    """What a rule says about one operation.

    Attributes:
        paths: the unrolled network of the operation.
        sums: the sums that enter, in the order of their elements' ids.
        weights: the tensors of the model that take part.
        ids: the results as ids, flat.
        spec: the structure of the results.
        shown: the results in the captured graph, flat.
    """

    paths: LocalPaths
    sums: list[Sum]
    weights: list[Tensor]
    ids: list[Any]
    spec: Any
    shown: list[Any]

    def results(self, p: float) -> Any:
        """The results as sums; tensors of zeros where they are not real numbers."""
        logs = self.logs(p)
        values = [
            (
                self._summed(ids, logs)
                if not isinstance(real, Tensor) or _is_real(real)
                else torch.zeros(shape_of(real), dtype=real.dtype)
            )
            for ids, real in zip(self.ids, self.shown, strict=True)
        ]
        return pytree.tree_unflatten(values, self.spec)

    def only(self, p: float, entering: Sequence[Tensor] | None = None, start: float = 0.0) -> Sum:
        """The single result as a sum, perhaps for other operands, or for other
        values with which paths start inside the operation.
        """
        return self._summed(self.ids[0], self.logs(p, entering, start))

    def ended(self, p: float) -> list[Sum]:
        """The sums over paths that end in the operation, of those that have come through an
        operand: tensors of the model that it uses end no path.
        """
        logs = self.logs(p)
        # (whatever the values: a path of value 0 ends, too)
        entering = torch.zeros(sum(one.values.numel() for one in self.sums))
        own = torch.zeros(sum(weight.numel() for weight in self.weights))
        through = self.paths.logs(entering, own, -math.inf)
        return [
            self._summed(ids, logs)
            for ids in self.paths.ended
            if not self._summed(ids, through).is_zero
        ]

    def logs(
        self, p: float, entering: Sequence[Tensor] | None = None, start: float = 0.0
    ) -> Tensor:
        """Logarithms of the sums over paths to every node."""
        values = (
            [_log(one.values) + one.log for one in self.sums]
            if entering is None
            else [_log(value) for value in entering]
        )
        own = [_log(absolute_power(weight, p)) for weight in self.weights]
        nothing = torch.zeros(0)
        return self.paths.logs(
            (torch.cat(values) if values else nothing).double(),
            (torch.cat(own) if own else nothing).double(),
            start,
        )

    def _summed(self, ids: Any, logs: Tensor) -> Sum:
        if isinstance(ids, Weight):
            ids = self.paths.attach(ids)
        known = torch.where(ids == NEUTRAL, -math.inf, logs[torch.where(ids == NEUTRAL, 0, ids)])
        top = float(known.detach().max()) if known.numel() else -math.inf
        return (
            Sum(torch.exp(known - top), top)
            if top > -math.inf
            else Sum(torch.zeros(known.shape).double())
        )


def read_rule(
    node: fx.Node,
    name: str,
    args: Any,
    kwargs: Any,
    chosen: Any,
    sources: Any,
    exact_norms: bool,
) -> Read:
    """Run the rule of an operation on sums over paths.

    Args:
        node: the operation in its graph.
        name: its name.
        args: its operands: sums, tensors of the model, numbers.
        kwargs: its keyword operands.
        chosen: whether a tensor depends on data (its numbers mean nothing).
        sources: placeholder name -> (kind, name).
        exact_norms: whether the ``eps`` of normalisations counts.

    Raises:
        ValueError: the rule does not know this form of the operation.
        UnsupportedError: there are too many paths.
    """
    flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Sum))
    # every place is an operand of its own, though two may have the same sums
    sums = [leaf for leaf in flat if isinstance(leaf, Sum)]
    own = {
        f"w{i}": leaf for i, leaf in enumerate(flat) if is_float_tensor(leaf) and not chosen(leaf)
    }
    starts, total = {}, 1
    for i, leaf in enumerate(flat):
        if isinstance(leaf, Sum):
            starts[i], total = total, total + leaf.values.numel()
    paths = LocalPaths(own, total - 1)
    paths.place = Place(name, result=node.meta.get("val"), node=node)
    paths.sources, paths.exact_norms = sources, exact_norms

    def operand(number: int, leaf: Any) -> Any:
        if isinstance(leaf, Sum):
            first = starts[number]
            return torch.arange(first, first + leaf.values.numel()).reshape(leaf.values.shape)
        if f"w{number}" in own:
            return Weight.of(f"w{number}", leaf.shape)
        if isinstance(leaf, Tensor):
            return constant(leaf.shape) if chosen(leaf) else with_value(leaf)
        return leaf

    own_args, own_kwargs = pytree.tree_unflatten(
        [operand(i, leaf) for i, leaf in enumerate(flat)], spec
    )
    own_args, own_kwargs = as_stored(paths, own_args, own_kwargs)
    result = RULES[name](paths, *own_args, **own_kwargs)
    ids, result_spec = pytree.tree_flatten(result)
    shown = pytree.tree_leaves(node.meta.get("val"))
    return Read(paths, sums, list(own.values()), ids, result_spec, shown)


def _log_sum(logs: list[Any], differentiable: bool) -> Any:
    """``log(sum(exp(logs)))`` of numbers, or of tensors of one number each."""
    finite = [log for log in logs if log > -math.inf]
    if differentiable:
        nothing = torch.tensor(-math.inf, dtype=torch.float64)
        return torch.logsumexp(torch.stack(finite), 0) if finite else nothing
    top = max(finite, default=0.0)
    return top + math.log(sum(math.exp(log - top) for log in finite)) if finite else -math.inf


def _log(value: Tensor) -> Tensor:
    """Logarithms of numbers, of 0 without a gradient."""
    flat = value.reshape(-1)
    return torch.where(flat == 0, 1.0, flat).log().masked_fill(flat == 0, -math.inf)


def _is_real(real: Tensor) -> bool:
    return real.is_floating_point() or real.is_complex()
