"""Sums over paths through operations whose properties in the table determine the result.

With ``s`` the sum of ``|v|^p`` over the paths to an element: a copy keeps ``s``, a linear map with
coefficients ``a`` gives ``sum |a|^p s``, a product of operands the product of their sums, and a
normalisation by running statistics multiplies ``s`` by one factor per channel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from ..inference.registry import FACTS, Facts, named_arguments, operation_name
from . import path_sums as sums
from .affine_maps import AffineMap
from .path_bounds import largest_slope
from .path_sums import Sum, is_float_tensor

# kinds of operations that compute with whole numbers as with real ones
NUMBERS = ("sum", "combination", "quotient", "concatenation")


class ByProperties(ABC):
    """Passes sums over paths through operations by their properties.

    Args:
        p: exponent of the norm.
        bound: replace functions that are not homogeneous by their largest slopes.
        fixed_ends: whether paths may end where scales are fixed.
        apart: whether the constants of a frozen normalisation are two paths.
    """

    def __init__(self, p: float, bound: bool, fixed_ends: bool, apart: bool = False) -> None:
        self.p, self.bound, self.fixed_ends, self.apart = p, bound, fixed_ends, apart
        self.ends: list[Sum] = []
        # placeholders for tensors that depend on data (integers, truth values): their
        # contents have no meaning
        self.decided: dict[int, Tensor] = {}
        # those that only whole numbers of the example inputs decide: as positions they are known
        self.positions: dict[int, Tensor] = {}

    @abstractmethod
    def refuse(self, name: str, args: Any, kwargs: Any, reason: str) -> NoReturn:
        """Raise an error that names the operation."""

    def _decided(self, value: Tensor, known: bool = False) -> Tensor:
        self.decided[id(value)] = value
        if known:
            self.positions[id(value)] = value
        return value

    def is_decided(self, value: Any) -> bool:
        """Whether a tensor is a placeholder for values that depend on data."""
        return id(value) in self.decided

    def is_unknown(self, value: Any) -> bool:
        """Whether a tensor depends on data, and the example inputs do not say what it contains."""
        return id(value) in self.decided and id(value) not in self.positions

    def is_condition(self, value: Any) -> bool:
        """Whether a tensor depends on data, and is unknown or chooses by truth values."""
        return self.is_unknown(value) or (self.is_decided(value) and value.dtype == torch.bool)

    def _weight(self, leaf: Any) -> Any:
        return (
            Sum(sums.absolute_power(leaf, self.p))
            if is_float_tensor(leaf) and not self.is_decided(leaf)
            else leaf
        )

    def number(self, leaf: Any) -> Any:
        """Whole numbers and truth values as real ones; those that data decide
        start paths of value 1, as inputs do.
        """
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.is_complex():
            return leaf
        decided = self.is_decided(leaf)
        return Sum(torch.ones(leaf.shape, dtype=torch.float64)) if decided else leaf.double()

    def by_facts(
        self, node: fx.Node, facts: Facts, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Use the properties of an operation if they determine the result;
        ``None`` if they do not.
        """
        shown, p = node.meta.get("val"), self.p
        if isinstance(shown, Tensor) and not shown.is_floating_point():
            return None
        if facts.kind in ("copy", "dropout"):
            # (alpha dropout adds constants in training)
            return None if "alpha" in node.name else self.kept(args[0], shown)
        if facts.kind == "power":
            return self._raised(facts, args)
        if facts.kind == "quotient" and self.fixed_ends and not kwargs and isinstance(args[1], Sum):
            # a division by a sum ends no path at a fixed scale: it divides the scales
            return sums.multiplied(
                torch.mul, FACTS["aten.mul"], (args[0], sums.sum_power(args[1], -1)), {}, p
            )
        if facts.kind == "normalisation":
            return self._frozen(node, run, args, kwargs)
        if "recurrence" in facts.kind and len(args) == 9:
            return self._recurrent(facts, args)
        if (
            facts.elementwise
            and facts.degree == (1,)
            and not facts.linear
            and facts.kind != "complex"
        ):
            return self.kept(self._rectified(operation_name(node.target), args, kwargs), shown)
        if (
            facts.kind == "activation"
            and not facts.degree
            and len(args) == 2
            and is_float_tensor(args[1])
        ):
            return self._sided(run, args)
        if facts.linear == "each":
            return self._product(node, facts, run, args, kwargs)
        if facts.elementwise and (facts.linear == "jointly" or _is_quotient(facts, args, kwargs)):
            return sums.jointly_affine_sum(run, args, kwargs, p)
        if facts.moves:
            return sums.moved_sums(run, args, kwargs, p, facts.kind in ("padding", "write"))
        return self._weighted(facts, run, args, kwargs, shown)

    def _rectified(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sum:
        """All paths of the operands pass ``max(x, y)`` or ``relu(x)``."""
        # (a rectifier with random slopes has a second operand for them)
        reached = args[:1] if "rrelu" in name else args
        parts = [
            leaf for leaf in map(self._weight, sums.sum_leaves(reached)) if isinstance(leaf, Sum)
        ]
        passed = sums.added(*parts) if len(parts) > 1 else parts[0]
        if not self.bound:
            return passed
        return Sum(passed.values * largest_slope(name, args, kwargs) ** self.p, passed.log)

    def bags(self, node: fx.Node, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Sums, means or maxima of rows, perhaps weighted; any row where data choose it."""
        given = named_arguments(node.target, args, kwargs)
        pad, factors = given.get("padding_idx"), given.get("per_sample_weights")
        table = sums.as_sum(given["weight"], self.p)
        factor = None if factors is None else sums.as_sum(factors, self.p)
        if pad == -1 and operation_name(node.target) != "aten.embedding_bag":
            pad = None
        if self.is_unknown(given["indices"]):
            given["indices"], pad = torch.zeros_like(given["indices"]), None
            table = Sum.of(table.values.sum(0, keepdim=True), table.log)

        def total(rows: Tensor) -> Tensor:
            found = torch.ops.aten.embedding_bag.padding_idx(
                rows, given["indices"], given["offsets"], False, 0, False,
                None if factor is None else factor.values, given["include_last_offset"], pad,
            )  # fmt: skip
            bags: Tensor = found[0]
            return bags

        values = total(table.values)
        if given["mode"] == 1:
            values = values / total(torch.ones_like(table.values)).clamp(min=1) ** self.p
        return self.kept(
            Sum.of(values, table.log + (factor.log if factor else 0.0)), node.meta["val"]
        )

    def scaled_source(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``index_add`` with its factor in what is added, for its rule."""
        source, factor = sums.as_sum(args[3], self.p), abs(kwargs.get("alpha", 1)) ** self.p
        rest = {key: value for key, value in kwargs.items() if key != "alpha"}
        return (*args[:3], Sum(source.values * factor, source.log)), rest

    def anywhere(self, name: str, run: Any, args: tuple[Any, ...]) -> Sum | None:
        """Elements at positions that data choose: all elements that they may choose pass, as
        those of a maximum do.
        """
        x, p = args[0], self.p
        if name in ("aten.index", "aten._unsafe_index"):
            chosen = [i is not None and self.is_unknown(i) for i in args[1]]
            if any(i is not None and i.dtype == torch.bool for i in args[1]):
                return None
            dims = [dim for dim, unknown in enumerate(chosen) if unknown]
            places: Any = [
                torch.zeros_like(i) if unknown else i
                for i, unknown in zip(args[1], chosen, strict=True)
            ]
            rest = (places, *args[2:])
        elif name == "aten.embedding":
            dims, rest = [0], (torch.zeros_like(args[1]),)
        elif name in ("aten.index_select", "aten.gather"):
            dims, rest = [args[1]], (args[1], torch.zeros_like(args[2]))
        else:
            return None
        x = sums.as_sum(x, p)
        if not x.values.dim():
            return None
        total = Sum.of(x.values.sum(dims, keepdim=True), x.log)
        found: Sum = sums.moved_sums(run, (total, *rest), {}, p, False)
        return found

    def _product(
        self, node: fx.Node, facts: Facts, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.bound and len(list(sums.each_sum((args, kwargs)))) > 1:
            self.refuse(
                operation_name(node.target),
                args,
                kwargs,
                "a product of activations has no largest slope",
            )

        def number(leaf: Any) -> Any:
            """Integers and masks of the model as factors; those that depend on
            data may be 1 everywhere.
            """
            whole = (
                isinstance(leaf, Tensor)
                and not leaf.is_floating_point()
                and not self.is_decided(leaf)
            )
            return leaf.double() if whole else leaf

        return sums.multiplied(run, facts, sums.map_sums(number, args), kwargs, self.p)

    def _weighted(
        self, facts: Facts, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shown: Any
    ) -> Any:
        """A linear map of one operand with constant coefficients, or a maximum over windows."""
        x, p = args[0], self.p
        if not isinstance(x, Sum) or not (facts.linear or facts.separable):
            return None
        if not facts.separable and facts.coefficients == "real":
            return self._measured(run, args, kwargs)

        def apply(values: Tensor) -> Tensor:
            found = run(values, *args[1:], **kwargs)
            result: Tensor = found[0] if isinstance(found, tuple) else found
            return result

        if p == 1 and facts.linear and facts.coefficients == "positive":
            return Sum.of(apply(x.values), x.log)
        if facts.kind == "mean":
            averaged = apply(x.values)
            return Sum.of(
                averaged * (averaged.numel() / max(x.values.numel(), 1)) ** (p - 1), x.log
            )
        if facts.separable:
            rank = _rank(operation_name(run))
            batched = x if x.values.dim() == rank + 2 else Sum(x.values.unsqueeze(0), x.log)
            found = sums.separated(apply, batched, p, rank)
            return self.kept(
                found if batched is x else Sum(found.values.squeeze(0), found.log), shown
            )
        return self._measured(run, args, kwargs)

    def _measured(self, run: Any, args: Any, kwargs: Any) -> Sum:
        """An affine map whose coefficients are not known."""
        found = AffineMap(run, args, kwargs)
        start = found.at({})
        return sums.added(
            found.by_unit_vectors(start, self.p), Sum(sums.absolute_power(start, self.p))
        )

    def _recurrent(self, facts: Facts, args: tuple[Any, ...]) -> Any:
        """A recurrent layer: all steps with ReLU; with gates, paths end in
        the gates of every step.
        """
        if any(isinstance(each, Sum) for each in args[2]):
            # (weights that are computed)
            return None
        states = [
            sums.as_sum(each, self.p)
            for each in (args[1] if isinstance(args[1], list | tuple) else [args[1]])
        ]
        x = sums.as_sum(args[0], self.p)
        if facts.kind == "recurrence":
            return sums.recurrent(x, states[0], args[2], args[3:], self.p)
        if not self.fixed_ends or len(args[2]) % (4 if args[3] else 2):
            return None
        out, last = sums.recurrent(x, states[0], args[2], args[3:], self.p, self.ends)
        return (out, *([last] * len(states)))

    def _sided(self, run: Any, args: tuple[Any, ...]) -> Sum:
        """``max(x, 0) + a min(x, 0)`` with a weight ``a``: each path passes unchanged, and
        once more through ``a``.
        """
        x, slope = args[0], args[1].double()
        shape = [slope.numel() if d == 1 or slope.dim() > 1 else 1 for d in range(x.values.dim())]
        shape = list(slope.shape) if slope.dim() == x.values.dim() else shape
        ways = [
            run(torch.full(shape, side, dtype=torch.float64), slope).abs() ** self.p
            for side in (1.0, -1.0)
        ]
        return Sum.of(x.values * sum(ways), x.log)

    def kept(self, value: Sum, shown: Any) -> Any:
        """A sum as the first result, and placeholders for any further results of the operation."""
        if isinstance(shown, Tensor):
            return value
        more = [
            self._decided(torch.zeros(tuple(other.shape), dtype=other.dtype)) for other in shown[1:]
        ]
        return (value, *more)

    def _raised(self, facts: Facts, args: tuple[Any, ...]) -> Sum | None:
        """A power: for a whole exponent products of that many paths; else no paths,
        but a power of the scale.
        """
        exponent = args[1] if len(args) > 1 else facts.degree[0]
        if (
            not isinstance(exponent, int | float)
            or not isinstance(args[0], Sum)
            or (self.bound and exponent != 1)
        ):
            return None
        whole = exponent >= 1 and exponent == int(exponent)
        # (the exponents that the rule supports)
        followed = 0 < abs(exponent) <= 8 and float(8 * 3 * 5 * 7 * exponent).is_integer()
        return (
            sums.sum_power(args[0], exponent) if whole or (self.fixed_ends and followed) else None
        )

    def _frozen(
        self, node: fx.Node, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A normalisation by running statistics, an affine map per channel; ``None``
        for statistics of the data.
        """
        named = named_arguments(node.target, args, kwargs)
        by_batch = named.get("training", False)
        if by_batch and not self.fixed_ends:
            self.refuse(
                operation_name(node.target),
                args,
                kwargs,
                "batch statistics tie samples; use model.eval()",
            )
        statistics = [named.get(key) for key in ("running_mean", "running_var")]
        own = named.get("use_input_stats", "running_mean" not in named)
        if own or not all(isinstance(each, Tensor) for each in statistics):
            return None
        x = args[0]
        shape = [n if d == 1 else 1 for d, n in enumerate(x.values.shape)]
        rest = [leaf.double() if is_float_tensor(leaf) else leaf for leaf in args[1:]]
        zero, one = (
            run(torch.full(shape, n, dtype=torch.float64), *rest, **kwargs) for n in (0.0, 1.0)
        )
        shift, end = (found if isinstance(found, Tensor) else found[0] for found in (zero, one))
        parts = [shift]
        if self.apart and isinstance(bias := named.get("bias"), Tensor):
            own = bias.double().reshape(shape)
            parts = [shift - own, own.expand_as(shift)]
        scaled = Sum(x.values * (end - shift).abs() ** self.p, x.log)
        constants = [Sum(part.abs() ** self.p) for part in parts]
        return self.kept(sums.added(scaled, *constants), node.meta.get("val"))


def _is_quotient(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a sum is divided by constants or weights."""
    return (
        facts.kind == "quotient"
        and not isinstance(args[1], Sum)
        and kwargs.get("rounding_mode") is None
    )


def _rank(name: str) -> int:
    """Image dimensions of an operation named like ``max_pool2d_with_indices``."""
    return next(
        int(name[i]) for i in range(len(name) - 1) if name[i].isdigit() and name[i + 1] == "d"
    )
