"""The paths through one operation, read from its rule: for operations of which
the table does not say more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..inference.registry import RULES
from ..inference.semantics import Place, as_stored
from ..inference.unrolled import PRODUCT, START, Unrolled
from ..inference.values import NEUTRAL, ROOT, Value, Weight, constant, shape_of, with_value
from .path_sums import OperationCall, Sum, Unknown, absolute_power, is_condition, is_float

# an element that enters arrives from outside
LEAF = -3


class LocalPaths(Unrolled):
    """The unrolled network of one operation, as its rule says: what enters are nodes.

    ``ends`` are elements whose scale is fixed; ``restarts``: paths start again behind it. A form
    that the rule does not know is a ValueError.
    """

    def __init__(self, call: OperationCall, sources: Any, exact: bool) -> None:
        flat, spec = pytree.tree_flatten((call.args, call.kwargs))
        self.weights = [leaf for leaf in flat if is_float(leaf)]
        # every place is an operand of its own, though two may have the same sums
        self.entering = sum(one.values.numel() for one in call.entering)
        offsets, shapes, total, first = {}, {}, self.entering, 1
        for i, leaf in enumerate(flat):
            if isinstance(leaf, Sum):
                count = leaf.values.numel()
                flat[i] = torch.arange(first, first + count).reshape(leaf.values.shape)
                first += count
            elif is_float(leaf):
                offsets[f"w{i}"], shapes[f"w{i}"] = total, tuple(leaf.shape)
                flat[i], total = Weight.of(f"w{i}", leaf.shape), total + leaf.numel()
            elif isinstance(leaf, Tensor):
                known = leaf.as_subclass(Tensor)
                flat[i] = constant(leaf.shape) if is_condition(leaf) else with_value(known)
        super().__init__(offsets, shapes)
        self.arrivals += [frozenset({(LEAF, node)}) for node in range(1, self.entering + 1)]
        self.call, self.ends, self.restarts = call, list[Tensor](), False
        self.place = Place(call.name, result=call.shown, node=call.node)
        self.sources, self.exact_norms = sources, exact
        args, kwargs = as_stored(self, *pytree.tree_unflatten(flat, spec))
        ids, self.spec = pytree.tree_flatten(RULES[call.name](self, *args, **kwargs))
        self.ids = [self.attach(each) if isinstance(each, Weight) else each for each in ids]

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
        self.ends.append(value)

    def results(self, p: float) -> Any:
        """The results as sums; tensors of zeros where they are not real numbers."""
        logs = self._logs(p)
        values = [
            _summed(ids, logs)
            if not isinstance(real, Tensor) or real.is_floating_point()
            else torch.zeros(shape_of(real), dtype=real.dtype).as_subclass(Unknown)
            for ids, real in zip(self.ids, pytree.tree_leaves(self.call.shown), strict=True)
        ]
        return pytree.tree_unflatten(values, self.spec)

    def ended(self, p: float) -> list[Sum]:
        """The sums that end in the operation, of those that have come through an operand."""
        if not self.ends:
            return []
        # (whatever the values: a path of value 0 ends, too)
        edges = self.entering + sum(weight.numel() for weight in self.weights)
        through = self._along(torch.zeros(edges, dtype=torch.float64), -math.inf)
        logs = self._logs(p)
        return [_summed(ids, logs) for ids in self.ends if bool(_summed(ids, through).values.any())]

    def _logs(self, p: float) -> Tensor:
        operands = [_log(one.values) + one.log for one in self.call.entering]
        own = [_log(absolute_power(weight, p)) for weight in self.weights]
        return self._along(torch.cat([*operands, *own]), 0.0)

    def _along(self, edges: Tensor, start: float) -> Tensor:
        """Logarithms of all nodes, from those of what enters, and of paths' first values."""
        # (numbers take far less time than tensors, which have gradients)
        numbers: list[Any] = list(edges.unbind()) if edges.requires_grad else edges.tolist()
        found: list[Any] = [start, *numbers[: self.entering]]
        for arrivals in self.arrivals[self.entering + 1 :]:
            ways = []
            for edge, before in arrivals:
                if edge == PRODUCT:
                    ways.append(sum(found[node] for node in self.pairs[before]))
                else:
                    ways.append(found[before] + (0.0 if edge in (START, LEAF) else numbers[edge]))
            found.append(_log_sum([way for way in ways if way > -math.inf]))
        if edges.requires_grad:
            return torch.stack([torch.as_tensor(log, dtype=torch.float64) for log in found])
        return torch.tensor(found, dtype=torch.float64)


def _log_sum(logs: list[Any]) -> Any:
    top = max(logs, default=-math.inf)
    if any(isinstance(log, Tensor) for log in logs):
        tensors = [torch.as_tensor(log, dtype=torch.float64) for log in logs]
        return torch.logsumexp(torch.stack(tensors), 0)
    return top + math.log(sum(math.exp(log - top) for log in logs)) if logs else top


def _log(value: Tensor) -> Tensor:
    flat = value.reshape(-1)
    return torch.where(flat == 0, 1.0, flat).log().masked_fill(flat == 0, -math.inf)


def _summed(ids: Tensor, logs: Tensor) -> Sum:
    none = ids == NEUTRAL
    known = torch.where(none, -math.inf, logs[torch.where(none, 0, ids)])
    top = float(known.detach().max()) if known.numel() else -math.inf
    if top == -math.inf:
        return Sum(torch.zeros(known.shape, dtype=torch.float64))
    return Sum(torch.exp(known - top), top)
