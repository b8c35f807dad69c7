"""Sums over paths through operations whose properties in the table determine the result."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..capture.captured import Captured
from ..inference.registry import FACTS, Facts, facts_of, named_arguments, operation_name
from . import path_sums as sums
from .path_sums import AffineMap, Chosen, Operation, Sum, Unknown, is_float, is_number


@dataclass(frozen=True)
class Request:
    """What is asked of a forward pass, and where paths have ended so far (``ends``).

    ``bound``: pass functions by slopes. ``fixed_ends``: end paths where scales are fixed.
    ``apart``: two paths through gain and bias of a frozen normalisation. ``inside``: the part in
    whose results (``exits``, not computed yet) paths end.
    """

    captured: Captured
    p: float
    bound: bool = False
    fixed_ends: bool = False
    exact_norms: bool = False
    apart: bool = False
    inside: set[fx.Node] = field(default_factory=set)
    exits: set[fx.Node] = field(default_factory=set)
    ends: list[Sum] = field(default_factory=list)


@dataclass(frozen=True)
class OperationCall:
    """An operation with its operands: sums, tensors of the model, numbers."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def name(self) -> str:
        """Its name."""
        return operation_name(self.node.target)

    @cached_property
    def facts(self) -> Facts:
        """Its properties."""
        return facts_of(self.node)

    @cached_property
    def run(self) -> Operation:
        """It, or its out-of-place form if it writes into an operand."""
        target: Any = self.node.target
        schema = getattr(target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return target  # type: ignore[no-any-return]
        return getattr(torch.ops.aten, self.name.removeprefix("aten.").rstrip("_"), target)  # type: ignore[no-any-return]

    @cached_property
    def given(self) -> dict[str, Any]:
        """Its operands by name."""
        return named_arguments(self.node.target, self.args, self.kwargs)

    @cached_property
    def leaves(self) -> list[Any]:
        """Its operands, flat."""
        return sums.leaves_of((self.args, self.kwargs))

    @property
    def entering(self) -> list[Sum]:
        """The sums among them."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Sum)]

    @property
    def shown(self) -> Any:
        """Its result in the captured graph."""
        return self.node.meta.get("val")

    def has(self, kind: type) -> bool:
        """Whether some operand is of a class."""
        return any(isinstance(leaf, kind) for leaf in self.leaves)

    def mapped(self, function: Any) -> OperationCall:
        """The same with other operands."""
        return OperationCall(self.node, *sums.map_sums(function, (self.args, self.kwargs)))

    def kept(self, value: Sum) -> Any:
        """A sum as the first result, and unknown numbers for any further results."""
        if isinstance(self.shown, Tensor):
            return value
        more = [torch.zeros(tuple(other.shape), dtype=other.dtype) for other in self.shown[1:]]
        return (value, *(other.as_subclass(Unknown) for other in more))


class ByFacts(fx.Interpreter):
    """Passes sums over paths through operations by their properties."""

    def __init__(self, module: fx.GraphModule, request: Request) -> None:
        super().__init__(module)
        self.request, self.p = request, request.p
        self.by_kind = {
            "dropout": lambda call: call.kept(call.args[0]) if call.facts.degree else None,
            "power": self._raised, "normalisation": self._frozen,
        }  # fmt: skip

    @abstractmethod
    def refuse(self, call: OperationCall, reason: str) -> NoReturn:
        """Raise an error that names the operation."""

    def by_facts(self, call: OperationCall) -> Any:
        """The result if properties of the operation determine it, or ``None``."""
        facts, p, shown = call.facts, self.p, call.shown
        if facts.kind == "choice" and call.has(Chosen):
            return self._either(call)
        if facts.kind in ("pick", "write", "part") and call.has(Unknown):
            return None
        if isinstance(shown, Tensor) and not shown.is_floating_point():
            return None
        if facts.kind in self.by_kind:
            return self.by_kind[facts.kind](call)
        if facts.linear == "each":
            if self.request.bound and len(call.entering) > 1:
                self.refuse(call, "a product of activations has no largest slope")
            return sums.multiplied(call.run, facts, call.args, call.kwargs, p)
        if facts.elementwise:
            return self._elementwise(call)
        if facts.moves:
            fills = facts.kind in ("padding", "write")
            return sums.moved_sums(call.run, call.args, call.kwargs, p, fills)
        linear = facts.linear or facts.separable
        return self._weighted(call) if linear and isinstance(call.args[0], Sum) else None

    def _elementwise(self, call: OperationCall) -> Any:
        facts, args, p = call.facts, call.args, self.p
        if facts.linear == "jointly":
            return AffineMap(call.run, args, call.kwargs, p, True).sums()
        if facts.kind == "quotient" and call.kwargs.get("rounding_mode") is None:
            if not isinstance(args[1], Sum):
                return AffineMap(call.run, args, call.kwargs, p, True).sums()
            if self.request.fixed_ends:
                # a division by a sum ends no path at a fixed scale: it divides the scales
                factors = (args[0], sums.sum_power(args[1], -1))
                return sums.multiplied(torch.mul, FACTS["aten.mul"], factors, {}, p)
        sloped = facts.kind == "activation" and len(args) == 2 and is_float(args[1])
        if facts.degree == (1,) and facts.kind != "activation":
            # all paths of the operands pass a maximum
            return sums.added(
                *(sums.as_sum(one, p) for one in call.leaves if isinstance(one, Sum | Tensor))
            )
        return call.kept(self._rectified(call)) if facts.degree == (1,) or sloped else None

    def _rectified(self, call: OperationCall) -> Sum:
        """All paths pass ``max(x, 0) + a min(x, 0)``, and again through a weight ``a``."""
        x, rest = sums.as_sum(call.args[0], self.p), [sums.wide(leaf) for leaf in call.args[1:]]
        weighted, shape = not call.facts.degree, [1] * x.values.dim()
        if not weighted and not self.request.bound:
            return x
        if weighted and rest[0].dim() == len(shape):
            shape = list(rest[0].shape)
        elif weighted and len(shape) > 1:
            shape[1] = rest[0].numel()
        # (random slopes are kept in an operand)
        if not weighted:
            rest = [torch.ones(shape) if isinstance(leaf, Sum | Tensor) else leaf for leaf in rest]
        sides = [
            pytree.tree_leaves(call.run(torch.full(shape, side).double(), *rest, **call.kwargs))[0]
            for side in (1.0, -1.0)
        ]
        one, other = (side.abs() ** self.p for side in sides)
        slope = one + other if weighted else torch.maximum(one, other)
        return x.changed(lambda values: values * slope)

    def _either(self, call: OperationCall) -> Sum:
        """The operands of a choice that data make: all paths of both."""
        real = [
            one for one in call.leaves if isinstance(one, Sum) or is_float(one) or is_number(one)
        ]
        found = sums.added(*(sums.as_sum(one, self.p) for one in real))
        shapes = [one.shape for one in call.leaves if isinstance(one, Tensor)]
        shape = torch.broadcast_shapes(found.values.shape, *shapes)
        return Sum(found.values.expand(shape), found.log)

    def _weighted(self, call: OperationCall) -> Any:
        facts, x = call.facts, call.args[0]

        def apply(values: Tensor) -> Tensor:
            found = call.run(values, *call.args[1:], **call.kwargs)
            result: Tensor = found if isinstance(found, Tensor) else found[0]
            return result

        if facts.coefficients == "positive" and (self.p == 1 or facts.kind == "mean"):
            mean = apply(x.values)
            share = mean.numel() / max(x.values.numel(), 1)
            return Sum.of(mean if self.p == 1 else mean * share ** (self.p - 1), x.log)
        if facts.separable:
            # (the operations are named like ``max_pool2d``)
            rank = int(re.findall(r"(\d)d", call.name)[0])
            batched = x if x.values.dim() == rank + 2 else Sum(x.values[None], x.log)
            found = sums.separated(apply, batched, self.p, rank)
            return call.kept(found if batched is x else Sum(found.values[0], found.log))
        return AffineMap(call.run, call.args, call.kwargs, self.p, False).sums()

    def _raised(self, call: OperationCall) -> Sum | None:
        x, exponent = call.args[0], (*call.args[1:], *call.facts.degree)[0]
        if not is_number(exponent) or not isinstance(x, Sum):
            return None
        whole = exponent >= 1 and exponent == int(exponent)
        # (the exponents that the rule supports)
        followed = 0 < abs(exponent) <= 8 and float(8 * 3 * 5 * 7 * exponent).is_integer()
        kept = whole or (self.request.fixed_ends and followed)
        return sums.sum_power(x, exponent) if kept else None

    def _frozen(self, call: OperationCall) -> Any:
        """A normalisation by running statistics, an affine map per channel, or ``None``."""
        given, x = call.given, call.args[0]
        if given.get("training", False) and not self.request.fixed_ends:
            self.refuse(call, "batch statistics tie samples; use model.eval()")
        statistics = [given.get(key) for key in ("running_mean", "running_var")]
        own = given.get("use_input_stats", "running_mean" not in given)
        if own or not all(isinstance(each, Tensor) for each in statistics):
            return None
        shape = [n if d == 1 else 1 for d, n in enumerate(x.values.shape)]
        rest = [sums.wide(leaf) for leaf in call.args[1:]]
        shift, end = (
            pytree.tree_leaves(call.run(torch.full(shape, n).double(), *rest, **call.kwargs))[0]
            for n in (0.0, 1.0)
        )
        parts = [shift]
        if self.request.apart and isinstance(bias := given.get("bias"), Tensor):
            added = bias.double().reshape(shape)
            parts = [shift - added, added.expand_as(shift)]
        scaled = Sum(x.values * (end - shift).abs() ** self.p, x.log)
        return call.kept(sums.added(scaled, *(Sum(part.abs() ** self.p) for part in parts)))
