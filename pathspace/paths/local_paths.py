"""The paths through one operation, read from its rule: for operations of which
the table does not say more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..inference.registry import RULES
from ..inference.semantics import Place, as_stored
from ..inference.unrolled import PRODUCT, START, Unrolled
from ..inference.values import NEUTRAL, ROOT, Value, Weight, constant, shape_of, with_value
from .path_facts import Call
from .path_sums import Sum, Unknown, absolute_power, is_condition, is_float, plain

# an element that enters arrives from outside
LEAF = -3


class LocalPaths(Unrolled):
    """The unrolled network of one operation: every element that enters is a node of its own.

    Attributes:
        ended: ids of elements whose scale the operation fixes, as often as it does.
        restarts: whether paths start again, or follow a sign or an order alone.
    """

    def __init__(self, weights: dict[str, Tensor], count: int) -> None:
        offsets, total = {}, count
        for name, weight in weights.items():
            offsets[name], total = total, total + weight.numel()
        super().__init__(offsets, {name: tuple(weight.shape) for name, weight in weights.items()})
        self.entering = count
        self.arrivals += [frozenset({(LEAF, node)}) for node in range(1, count + 1)]
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

    def logs(self, edges: Tensor, start: float = 0.0) -> Tensor:
        """Logarithms of the sums over paths to every node.

        Args:
            edges: logarithms of the sums of the elements that enter, and of the weights.
            start: logarithm of the value with which paths start inside the operation.
        """
        # (numbers take far less time than tensors, which have gradients)
        numbers: list[Any] = list(edges.unbind()) if edges.requires_grad else edges.tolist()
        first = torch.tensor(start, dtype=torch.float64) if edges.requires_grad else start
        found = [first, *numbers[: self.entering]]
        for arrivals in self.arrivals[self.entering + 1 :]:
            ways = []
            for edge, before in arrivals:
                if edge == PRODUCT:
                    ways.append(sum(found[node] for node in self.pairs[before]))
                else:
                    ways.append(found[before] + (0.0 if edge in (START, LEAF) else numbers[edge]))
            found.append(_log_sum([way for way in ways if way > -math.inf]))
        return (
            torch.stack(found) if edges.requires_grad else torch.tensor(found, dtype=torch.float64)
        )


def _log_sum(logs: list[Any]) -> Any:
    """``log(sum(exp(logs)))`` of numbers, or of tensors of one number each."""
    if not logs:
        return torch.tensor(-math.inf, dtype=torch.float64)
    if isinstance(logs[0], Tensor):
        return torch.logsumexp(torch.stack(logs), 0)
    top = max(logs)
    return top + math.log(sum(math.exp(log - top) for log in logs))


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
    ids: list[Tensor]
    spec: Any
    shown: list[Any]

    def results(self, p: float) -> Any:
        """The results as sums; tensors of zeros where they are not real numbers."""
        logs = self._logs(p)
        values = [
            _summed(ids, logs)
            if not isinstance(real, Tensor) or real.is_floating_point() or real.is_complex()
            else torch.zeros(shape_of(real), dtype=real.dtype).as_subclass(Unknown)
            for ids, real in zip(self.ids, self.shown, strict=True)
        ]
        return pytree.tree_unflatten(values, self.spec)

    def linear(self, p: float, entering: Sequence[Tensor] | None = None) -> Sum:
        """The single result without constants, perhaps for other operands."""
        return _summed(self.ids[0], self._logs(p, entering, -math.inf))

    def ended(self, p: float) -> list[Sum]:
        """The sums over paths that end in the operation, of those that have come through an
        operand: tensors of the model that it uses end no path.
        """
        if not self.paths.ended:
            return []
        # (whatever the values: a path of value 0 ends, too)
        edges = sum(each.numel() for each in (*(one.values for one in self.sums), *self.weights))
        through = self.paths.logs(torch.zeros(edges, dtype=torch.float64), -math.inf)
        logs = self._logs(p)
        return [
            _summed(ids, logs)
            for ids in self.paths.ended
            if bool(_summed(ids, through).values.any())
        ]

    def _logs(
        self, p: float, entering: Sequence[Tensor] | None = None, start: float = 0.0
    ) -> Tensor:
        operands = (
            [_log(one.values) + one.log for one in self.sums]
            if entering is None
            else [_log(value) for value in entering]
        )
        own = [_log(absolute_power(weight, p)) for weight in self.weights]
        return self.paths.logs(
            torch.cat([torch.zeros(0, dtype=torch.float64), *operands, *own]), start
        )


def _log(value: Tensor) -> Tensor:
    """Logarithms of numbers, of 0 without a gradient."""
    flat = value.reshape(-1)
    return torch.where(flat == 0, 1.0, flat).log().masked_fill(flat == 0, -math.inf)


def _summed(ids: Tensor, logs: Tensor) -> Sum:
    none = ids == NEUTRAL
    known = torch.where(none, -math.inf, logs[torch.where(none, 0, ids)])
    top = float(known.detach().max()) if known.numel() else -math.inf
    if top == -math.inf:
        return Sum(torch.zeros(known.shape, dtype=torch.float64))
    return Sum(torch.exp(known - top), top)


def read_rule(call: Call, sources: Any, exact: bool) -> Read:
    """Run the rule of an operation on sums over paths.

    Args:
        call: the operation with its operands.
        sources: placeholder name -> (kind, name).
        exact: whether the ``eps`` of normalisations counts.

    Raises:
        ValueError: the rule does not know this form of the operation.
        UnsupportedError: there are too many paths.
    """
    flat, spec = pytree.tree_flatten(
        (call.args, call.kwargs), is_leaf=lambda leaf: isinstance(leaf, Sum)
    )
    own = {f"w{i}": leaf for i, leaf in enumerate(flat) if is_float(leaf)}
    # every place is an operand of its own, though two may have the same sums
    sums = [leaf for leaf in flat if isinstance(leaf, Sum)]
    paths = LocalPaths(own, sum(one.values.numel() for one in sums))
    paths.place = Place(call.name, result=call.shown, node=call.node)
    paths.sources, paths.exact_norms = sources, exact
    first = 1
    for i, leaf in enumerate(flat):
        if isinstance(leaf, Sum):
            count = leaf.values.numel()
            flat[i] = torch.arange(first, first + count).reshape(leaf.values.shape)
            first += count
        elif f"w{i}" in own:
            flat[i] = Weight.of(f"w{i}", leaf.shape)
        elif isinstance(leaf, Tensor):
            flat[i] = constant(leaf.shape) if is_condition(leaf) else with_value(plain(leaf))
    own_args, own_kwargs = as_stored(paths, *pytree.tree_unflatten(flat, spec))
    ids, result_spec = pytree.tree_flatten(RULES[call.name](paths, *own_args, **own_kwargs))
    ids = [paths.attach(each) if isinstance(each, Weight) else each for each in ids]
    shown = pytree.tree_leaves(call.shown)
    return Read(paths, sums, list(own.values()), ids, result_spec, shown)
