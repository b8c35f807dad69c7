"""One forward pass of a captured graph on sums over paths, with the properties
from the table of operations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pathspace import path_sums as sums
from pathspace.capture import Captured, place
from pathspace.errors import InputError, PathspaceError, UnsupportedError
from pathspace.inference.decompose import decomposed
from pathspace.inference.regions import REGIONS, once
from pathspace.inference.registry import FACTS, RULES, Facts, facts_of, operation_name
from pathspace.local_paths import read_rule
from pathspace.path_sums import MANY, Sum
from pathspace.without_values import require_values

FIXED = "fixed"


def logs_of_sums(
    captured: Captured,
    p: float,
    batch_dim: int | None,
    until: str | None,
    bound: bool,
    exact_norms: bool,
) -> list[float]:
    """Logarithms of ``sum over paths |v|^p`` for each tensor in which paths end, per sample.

    Args:
        captured: the graph.
        p: the exponent.
        batch_dim: dimension of the outputs that counts samples.
        until: where paths end; see :func:`pathspace.path_norm`.
        bound: replace functions that are not homogeneous by their largest slopes.
        exact_norms: whether the ``eps`` of normalisations fixes scales.
    """
    run = Forward(captured, p, until, bound, exact_norms)
    found = run.outputs()
    logs = []
    for one in found:
        samples = 1 if batch_dim is None or one.values.dim() == 0 else one.values.shape[batch_dim]
        logs.append(one.total - math.log(max(samples, 1)))
    return logs


class _Reached(Exception):
    """All tensors in which paths end have been computed."""


class Forward:
    """Interprets a captured graph on sums over paths; an operation on the model's tensors
    alone is computed as usual.

    Args:
        captured: the graph.
        p: exponent of the norm.
        until: where paths end, or ``None`` for the outputs.
        bound: replace functions that are not homogeneous by their largest slopes.
        exact_norms: whether the ``eps`` of normalisations fixes scales.
    """

    def __init__(
        self, captured: Captured, p: float, until: str | None, bound: bool, exact_norms: bool
    ) -> None:
        self.captured, self.p, self.bound, self.exact_norms = captured, p, bound, exact_norms
        self.fixed_ends = until == FIXED
        nodes = list(captured.graph.graph.nodes)
        self.inside = set() if until is None or self.fixed_ends else _inside(nodes, until)
        # results of that part that the rest of the graph reads
        self.exits = {
            node for node in self.inside if any(user not in self.inside for user in node.users)
        }
        self.ends: list[Sum] = []
        # placeholders for tensors that depend on data (integers, truth values): their
        # contents have no meaning
        self.decided: dict[int, Tensor] = {}
        self.node: fx.Node | None = None

    def outputs(self) -> list[Sum]:
        """The sums where paths end."""
        values: dict[fx.Node, Any] = {}
        for node in self.captured.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._placeholder(node)
        try:
            found = self.graph(self.captured.graph, values)
        except _Reached:
            return self.ends
        updates = self.captured.updates
        written = self.captured.written
        flat = [
            leaf for i, leaf in enumerate(sums.leaves(found)) if i >= updates and i not in written
        ]
        numbers = [leaf for leaf in flat if isinstance(leaf, Sum) or _is_float(leaf)]
        return [
            *self.ends,
            *(leaf if isinstance(leaf, Sum) else Sum(sums.power(leaf, self.p)) for leaf in numbers),
        ]

    def _placeholder(self, node: fx.Node) -> Any:
        kind, name = self.captured.sources.get(node.name, ("input", node.name))
        held: Mapping[str, Tensor] = {
            "parameter": self.captured.parameters, "buffer": self.captured.buffers,
            "constant": self.captured.constants
        }.get(kind, {})  # fmt: skip
        name = node.name if kind == "constant" else name
        if name in held:
            require_values("path_norm", [("a tensor of the model", held[name])])
            # (a tensor that replaces a parameter keeps its gradient)
            return held[name].detach() if isinstance(held[name], nn.Parameter) else held[name]
        shown = node.meta.get("val")
        if not isinstance(shown, Tensor):
            return shown
        if shown.is_floating_point():
            return Sum(torch.ones(tuple(shown.shape), dtype=torch.float64))
        return self._decided(torch.zeros(tuple(shown.shape), dtype=shown.dtype))

    def _decided(self, value: Tensor) -> Tensor:
        self.decided[id(value)] = value
        return value

    def is_decided(self, value: Any) -> bool:
        """Whether a tensor is a placeholder for values that depend on data."""
        return id(value) in self.decided

    def graph(self, module: fx.GraphModule, values: Mapping[fx.Node, Any]) -> Any:
        """Interpret a graph whose placeholders have the given values."""
        env = dict(values)
        last: dict[fx.Node, list[fx.Node]] = {}
        for source in module.graph.nodes:
            if source.users:
                last.setdefault(max(source.users), []).append(source)
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            if node.op == "get_attr":
                env[node] = operator.attrgetter(str(node.target))(module)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = self.call(node, tuple(args), dict(kwargs))
                if node in self.exits:
                    self._end(env[node])
                    self.exits.discard(node)
                    if not self.exits:
                        raise _Reached
            for source in last.get(node, ()):
                env.pop(source, None)
        return None

    def region(self, module: fx.GraphModule, operands: list[Any]) -> Any:
        """Interpret a graph inside the graph."""
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        return self.graph(module, dict(zip(places, operands, strict=False)))

    def _end(self, value: Any) -> None:
        self.ends += sums.each_sum(value)

    def call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply one operation: to the model's tensors as usual, to sums by
        its properties or its rule.
        """
        self.node = node
        name = operation_name(node.target)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if name in REGIONS:
            if REGIONS[name] is not once:
                return self.stopped(
                    name, args, kwargs, "which branch or how many steps are run depends on data"
                )
            return once(self, *args, **kwargs)
        flat = sums.leaves((args, kwargs))
        if not any(isinstance(leaf, Sum) for leaf in flat) and any(
            self.is_decided(leaf) for leaf in flat
        ):
            # elements that data selects from a tensor of the model are weights on paths
            args, kwargs = sums.mapped(self._weight, (args, kwargs))
            flat = sums.leaves((args, kwargs))
            if not any(isinstance(leaf, Sum) for leaf in flat):
                found = _plainly(node, args, kwargs)
                return pytree.tree_map(self._result, found)
            return self.passed(node, name, args, kwargs)
        if not any(isinstance(leaf, Sum) for leaf in flat):
            return _plainly(node, args, kwargs)
        return self.passed(node, name, args, kwargs, any(self.is_decided(leaf) for leaf in flat))

    def _weight(self, leaf: Any) -> Any:
        return (
            Sum(sums.power(leaf, self.p)) if _is_float(leaf) and not self.is_decided(leaf) else leaf
        )

    def _result(self, leaf: Any) -> Any:
        """A result that depends on data: floats start paths of value 1, other
        types become placeholders.
        """
        if not isinstance(leaf, Tensor):
            return leaf
        return (
            Sum(torch.ones(leaf.shape, dtype=torch.float64))
            if leaf.is_floating_point()
            else self._decided(leaf)
        )

    def passed(
        self,
        node: fx.Node,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unknown: bool = False,
    ) -> Any:
        """Pass sums through an operation; ``unknown`` if data selects the elements that it uses."""
        facts, run = facts_of(name), _functional(node.target)
        picks = unknown and facts.kind in ("pick", "write", "choice", "part")
        try:
            found = None if picks else self.by_facts(node, facts, run, args, kwargs)
            if found is not None:
                return found
            if name in RULES:
                return self.by_rule(node, name, facts, args, kwargs)
        except PathspaceError:
            raise
        except (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError):
            # the rule does not support these arguments: torch may decompose the operation
            pass
        smaller = decomposed(node)
        if smaller is None:
            return self.stopped(name, args, kwargs, "no rule says what it does to paths")
        names = {inner.name: inner for inner in smaller.graph.nodes if inner.op == "placeholder"}
        operands: dict[fx.Node, Any] = {}
        for own, value in zip(
            sums.leaves((node.args, node.kwargs)), sums.leaves((args, kwargs)), strict=False
        ):
            if isinstance(own, fx.Node):
                operands[names[own.name]] = value
        return self.graph(smaller, operands)

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
            return None if "alpha" in node.name else self._kept(args[0], shown)
        if facts.kind == "power":
            return self._raised(facts, args)
        if facts.kind == "quotient" and self.fixed_ends and not kwargs and isinstance(args[1], Sum):
            # a division by a sum ends no path at a fixed scale: it divides the scales
            return sums.multiplied(
                torch.mul, FACTS["aten.mul"], (args[0], sums.raised(args[1], -1)), {}, p
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
            # max(x, y), relu(x): all paths of the operands pass
            parts = [leaf for leaf in map(self._weight, sums.leaves(args)) if isinstance(leaf, Sum)]
            return self._kept(sums.added(*parts) if len(parts) > 1 else parts[0], shown)
        if (
            facts.kind == "activation"
            and not facts.degree
            and len(args) == 2
            and _is_float(args[1])
        ):
            return self._sided(run, args)
        if facts.linear == "each":
            return self._product(node, facts, run, args, kwargs)
        if facts.elementwise and (facts.linear == "jointly" or _is_quotient(facts, args, kwargs)):
            return sums.combined(run, args, kwargs, p)
        if facts.moves:
            return sums.moved(run, args, kwargs, p, facts.kind in ("padding", "write"))
        return self._weighted(facts, run, args, kwargs, shown)

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

        return sums.multiplied(run, facts, sums.mapped(number, args), kwargs, self.p)

    def _weighted(
        self, facts: Facts, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shown: Any
    ) -> Any:
        """A linear map of one operand with constant coefficients, or a maximum over windows."""
        x, p = args[0], self.p
        if not isinstance(x, Sum) or not (facts.linear or facts.separable):
            return None
        if not facts.separable and facts.coefficients == "real":
            return sums.by_unit_vectors(run, args, kwargs, p)

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
            return self._kept(
                found if batched is x else Sum(found.values.squeeze(0), found.log), shown
            )
        return sums.by_unit_vectors(run, args, kwargs, p)

    def _recurrent(self, facts: Facts, args: tuple[Any, ...]) -> Any:
        """A recurrent layer: all steps with ReLU; with gates, paths end in
        the gates of every step.
        """
        states = [
            sums.as_sum(each, self.p)
            for each in (args[1] if isinstance(args[1], list | tuple) else [args[1]])
        ]
        x, packed = sums.as_sum(args[0], self.p), not isinstance(args[3], bool)
        if facts.kind == "recurrence":
            return None if packed else sums.recurrent(x, states[0], args[2], args[3:], self.p)
        if packed or not self.fixed_ends or len(args[2]) % (4 if args[3] else 2):
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

    def _kept(self, value: Sum, shown: Any) -> Any:
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
        return sums.raised(args[0], exponent) if whole or (self.fixed_ends and followed) else None

    def _frozen(
        self, node: fx.Node, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A normalisation by running statistics, an affine map per channel; ``None``
        for statistics of the data.
        """
        schema = getattr(node.target, "_schema", None)
        named = (
            dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            if schema is not None
            else {}
        )
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
        rest = [leaf.double() if _is_float(leaf) else leaf for leaf in args[1:]]
        zero, one = (
            run(torch.full(shape, n, dtype=torch.float64), *rest, **kwargs) for n in (0.0, 1.0)
        )
        shift, end = (found if isinstance(found, Tensor) else found[0] for found in (zero, one))
        scaled = Sum(x.values * (end - shift).abs() ** self.p, x.log)
        return self._kept(sums.added(scaled, Sum(shift.abs() ** self.p)), node.meta.get("val"))

    def by_rule(self, node: fx.Node, name: str, facts: Facts, args: Any, kwargs: Any) -> Any:
        """Pass sums through the rule of the operation."""
        try:
            found, ended, reason = read_rule(
                node,
                name,
                args,
                kwargs,
                self.is_decided,
                self.p,
                self.captured.sources,
                self.exact_norms,
            )
        except UnsupportedError:
            why = (
                "gates fix the scale of what they read"
                if facts.kind == "gated recurrence"
                else "too many paths"
            )
            return self.stopped(name, args, kwargs, why)
        if ended and self.bound and facts.slope is not None and facts.elementwise:
            return Sum(args[0].values * facts.slope**self.p, args[0].log)
        if ended and not self.fixed_ends:
            self.refuse(name, args, kwargs, reason)
        self.ends += ended
        return pytree.tree_map(
            lambda leaf: self._decided(leaf) if isinstance(leaf, Tensor) else leaf,
            found,
            is_leaf=lambda leaf: isinstance(leaf, Sum),
        )

    def stopped(self, name: str, args: Any, kwargs: Any, reason: str) -> Any:
        """End paths in all operands of an operation that they cannot pass, or refuse
        if they may not end there.
        """
        if not self.fixed_ends:
            self.refuse(name, args, kwargs, reason)
        assert self.node is not None
        self._end((args, kwargs))
        return pytree.tree_map(
            lambda leaf: self._result(torch.zeros(tuple(leaf.shape), dtype=leaf.dtype)),
            self.node.meta["val"],
        )

    def refuse(self, name: str, args: Any, kwargs: Any, reason: str) -> NoReturn:
        """Raise an error that names the operation and its place; inside the requested
        part, end paths before it.

        Raises:
            UnsupportedError: the operation is not inside the requested part.
        """
        assert self.node is not None
        if self.node in self.inside:
            self._end((args, kwargs))
            raise _Reached
        module, line = place(self.node)
        raise UnsupportedError(
            f"path_norm cannot pass '{name.removeprefix('aten.')}' (module"
            f" {module or 'at the top'}, {line or 'unknown line'}): {reason};"
            f" until={module or self.node.name!r} gives the norm of the part before it, and"
            " until='fixed' the norm of all paths that end where scales are fixed."
        )


def _inside(nodes: list[fx.Node], until: str) -> set[fx.Node]:
    """The nodes of a module, or one node by its name.

    Raises:
        InputError: there are none.
    """
    calls = [node for node in nodes if node.op == "call_function"]
    within = {
        node for node in calls if any(_is_within(entry[0], until) for entry in _modules(node))
    }
    within = within or {node for node in calls if node.name == until}
    if not within:
        names = sorted({entry[0] for node in calls for entry in _modules(node) if entry[0]})
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise InputError(
            f"path_norm found until={until!r}, expected 'fixed', the name of a node, or of a module"
            f" that the model calls ({shown or 'it has none'})."
        )
    return within


def _modules(node: fx.Node) -> list[Any]:
    return list((node.meta.get("nn_module_stack") or {}).values())


def _is_within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


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


def _functional(target: Any) -> Callable[..., Any]:
    """An operation, or its out-of-place form if it writes into an operand."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target  # type: ignore[no-any-return]
    plain = getattr(torch.ops.aten, operation_name(target).removeprefix("aten.").rstrip("_"), None)
    result: Callable[..., Any] = plain if plain is not None else target
    return result


def _plainly(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on the model's tensors in double precision; large tensors that are
    only moved keep their type.
    """
    facts = facts_of(node)
    if not facts.moves or not any(
        isinstance(leaf, Tensor) and leaf.numel() > MANY for leaf in sums.leaves(args)
    ):
        kind = kwargs.get("dtype")
        if isinstance(kind, torch.dtype) and kind.is_floating_point:
            kwargs = {**kwargs, "dtype": torch.float64}
        args, kwargs = sums.mapped(
            lambda leaf: leaf.detach().double() if _is_float(leaf) else leaf, (args, kwargs)
        )
    target: Any = _functional(node.target)
    return target(*args, **kwargs)


__all__ = ["Forward", "logs_of_sums"]
