"""The paths through one operation, read from its rule: for operations of which
the table does not say more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pathspace.inference.conversions import as_stored
from pathspace.inference.registry import RULES
from pathspace.inference.semantics import Place
from pathspace.inference.unrolled import PRODUCT, START, Arrivals, Unrolled
from pathspace.inference.values import NEUTRAL, ROOT, Weight, constant, shape_of, with_value
from pathspace.path_sums import Sum, power

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
    """

    def __init__(self, weights: dict[str, Tensor], count: int) -> None:
        offsets, total = {}, 0
        for name, weight in weights.items():
            offsets[name], total = total, total + weight.numel()
        super().__init__(offsets, {name: tuple(weight.shape) for name, weight in weights.items()})
        self.arrivals = _Nodes(count)  # type: ignore[assignment]
        self.ended: list[Tensor] = []

    def fix(self, value: Tensor) -> None:
        """Paths end here, at every element."""
        super().fix(value)
        self.ended.append(value)

    def logs(self, entering: Tensor, weights: Tensor) -> Tensor:
        """Logarithms of the sums over paths to every node.

        Args:
            entering: logarithms of the sums of the elements that enter.
            weights: logarithms of the powers of the weights.
        """
        found = [0.0, *entering.tolist()]
        edges = weights.tolist()
        nodes: Any = self.arrivals
        for arrivals in nodes.made[1:]:
            ways = [self._way(found, edges, edge, before) for edge, before in arrivals]
            top = max(ways, default=-math.inf)
            finite = top > -math.inf
            found.append(
                top + math.log(sum(math.exp(way - top) for way in ways)) if finite else top
            )
        return torch.tensor(found, dtype=torch.float64)

    def _way(self, found: list[float], edges: list[float], edge: int, before: int) -> float:
        if edge == START:
            return 0.0
        if edge == PRODUCT:
            return sum(found[node] for node in self.pairs[before])
        return found[before] if edge == LEAF else edges[edge] + found[before]


def read_rule(
    node: fx.Node,
    name: str,
    args: Any,
    kwargs: Any,
    chosen: Any,
    p: float,
    sources: Any,
    exact_norms: bool,
) -> tuple[Any, list[Sum], str]:
    """Run the rule of an operation on sums over paths.

    Args:
        node: the operation in its graph.
        name: its name.
        args: its operands: sums, tensors of the model, numbers.
        kwargs: its keyword operands.
        chosen: whether a tensor depends on data (its numbers mean nothing).
        p: exponent of the norm.
        sources: placeholder name -> (kind, name).
        exact_norms: whether the ``eps`` of normalisations counts.

    Returns:
        The results as sums (tensors of zeros where they are not real numbers), the sums over paths
        that end in the operation, and the reason why they do.

    Raises:
        ValueError: the rule does not know this form of the operation.
        UnsupportedError: there are too many paths.
    """
    flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Sum))
    sums = list({id(leaf): leaf for leaf in flat if isinstance(leaf, Sum)}.values())
    own = {f"w{i}": leaf for i, leaf in enumerate(flat) if _is_weight(leaf) and not chosen(leaf)}
    starts, total = {}, 1
    for one in sums:
        starts[id(one)], total = total, total + one.values.numel()
    paths = LocalPaths(own, total - 1)
    paths.place = Place(name, result=node.meta.get("val"), node=node)
    paths.sources, paths.exact_norms = sources, exact_norms

    def operand(number: int, leaf: Any) -> Any:
        if isinstance(leaf, Sum):
            return torch.arange(starts[id(leaf)], starts[id(leaf)] + leaf.values.numel()).reshape(
                leaf.values.shape
            )
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
    entering = (
        torch.cat([one.values.reshape(-1).log() + one.log for one in sums])
        if sums
        else torch.zeros(0)
    )
    weights = (
        torch.cat([power(weight, p).reshape(-1).log() for weight in own.values()])
        if own
        else torch.zeros(0)
    )
    logs = paths.logs(entering.double(), weights.double())

    def summed(ids: Any) -> Sum:
        if isinstance(ids, Weight):
            ids = paths.attach(ids)
        known = torch.where(ids == NEUTRAL, -math.inf, logs[torch.where(ids == NEUTRAL, 0, ids)])
        top = float(known.max()) if known.numel() else -math.inf
        return (
            Sum(torch.exp(known - top), top)
            if top > -math.inf
            else Sum(torch.zeros(known.shape).double())
        )

    shown = pytree.tree_leaves(node.meta.get("val"))
    found, result_spec = pytree.tree_flatten(result)
    values = [
        (
            summed(ids)
            if not isinstance(real, Tensor) or _is_real(real)
            else torch.zeros(shape_of(real), dtype=real.dtype)
        )
        for ids, real in zip(found, shown, strict=True)
    ]
    ended = [summed(ids) for ids in paths.ended if bool(((ids != ROOT) & (ids != NEUTRAL)).any())]
    reason = paths.pins[0].reason if paths.pins else "not positively homogeneous" if ended else ""
    return pytree.tree_unflatten(values, result_spec), ended, reason


def _is_weight(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_real(real: Tensor) -> bool:
    return real.is_floating_point() or real.is_complex()


__all__ = ["read_rule"]
