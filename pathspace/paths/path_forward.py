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

from ..capture.captured import Captured, place
from ..errors import InputError, PathspaceError, UnsupportedError, expect_numbers
from ..inference.decompose import decomposed
from ..inference.regions import REGIONS, once
from ..inference.registry import RULES, Facts, facts_of, operation_name
from ..models.values import require_values
from . import path_sums as sums
from .affine_maps import AffineMap, agree
from .local_paths import Read, read_rule
from .path_attention import attended
from .path_bounds import without_bound
from .path_properties import NUMBERS, ByProperties
from .path_sums import MANY, Sum, is_float_tensor

FIXED = "fixed"
# kind of a homogeneous operation -> why it has no sum over paths
_NO_SUM = {
    "power": "only powers with a positive integer as exponent are sums over paths",
    "quotient": "a quotient is not a sum over paths",
}
# the positions of what is not zero, as many as there are
COUNTED = frozenset(["aten.nonzero", "aten.nonzero_numpy", "aten.argwhere"])


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
    if bound and until == FIXED:
        raise InputError(
            "path_norm found bound=True with until='fixed', expected one of them: paths that start"
            " again bound nothing; leave out until, or name a module."
        )
    samples = _samples(captured, batch_dim)
    run = Forward(captured, p, until, bound, exact_norms)
    return [one.total - math.log(samples) for one in run.outputs()]


def _samples(captured: Captured, batch_dim: int | None) -> int:
    """How many samples the example has: the size of that dimension in the first output that is not
    a single number. Inside the model and in further outputs, samples may lie elsewhere.

    Raises:
        InputError: the output has no such dimension.
    """
    expect_numbers("path_norm", "a whole number", or_none=True, batch_dim=batch_dim)
    shapes = [
        tuple(shown.shape)
        for node in captured.outputs()
        if isinstance(shown := node.meta.get("val"), Tensor)
        and shown.dim()
        and (shown.is_floating_point() or shown.is_complex())
    ]
    if batch_dim is None or not shapes:
        return 1
    if not -len(shapes[0]) <= batch_dim < len(shapes[0]):
        raise InputError(
            f"path_norm found batch_dim={batch_dim}, expected the dimension that counts samples in"
            f" an output of shape {shapes[0]}, or None if there is none."
        )
    count: Any = shapes[0][batch_dim]
    if not isinstance(count, int):
        raise InputError(
            f"path_norm found batch_dim={batch_dim}, a dimension of the outputs whose size depends"
            " on data, expected the dimension that counts samples; use batch_dim=None."
        )
    return max(count, 1)


class _Reached(Exception):
    """All tensors in which paths end have been computed."""


class Forward(ByProperties):
    """Interprets a captured graph on sums over paths; an operation on the model's tensors
    alone is computed as usual.

    Args:
        captured: the graph.
        p: exponent of the norm.
        until: where paths end, or ``None`` for the outputs.
        bound: replace functions that are not homogeneous by their largest slopes.
        exact_norms: whether the ``eps`` of normalisations fixes scales.
        apart: count the constants of a frozen normalisation, through its gain and through its
            bias, as two paths and not as one value.
    """

    def __init__(
        self,
        captured: Captured,
        p: float,
        until: str | None,
        bound: bool,
        exact_norms: bool,
        apart: bool = False,
    ) -> None:
        super().__init__(p, bound, until == FIXED, apart)
        self.captured, self.exact_norms = captured, exact_norms
        nodes = list(captured.graph.graph.nodes)
        self.inside = set() if until is None or self.fixed_ends else _inside(nodes, until)
        # results of that part that the rest of the graph reads
        self.exits = {
            node for node in self.inside if any(user not in self.inside for user in node.users)
        }
        self.node: fx.Node | None = None
        # the operation of the graph that is being decomposed
        self.whole: fx.Node | None = None

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
        flat = self.captured.without_updates(sums.sum_leaves(found))
        numbers = [leaf for leaf in flat if isinstance(leaf, Sum) or is_float_tensor(leaf)]
        return [
            *self.ends,
            *(
                leaf if isinstance(leaf, Sum) else Sum(sums.absolute_power(leaf, self.p))
                for leaf in numbers
            ),
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
            own = held[name].detach() if isinstance(held[name], nn.Parameter) else held[name]
            return own.cpu()
        shown = node.meta.get("val")
        if not isinstance(shown, Tensor):
            return shown
        if shown.is_floating_point() or shown.is_complex():
            return Sum(torch.ones(tuple(shown.shape), dtype=torch.float64))
        example = self.captured.whole.get(node.name)
        if example is not None:
            return self._decided(example.clone().cpu(), known=True)
        return self._decided(torch.zeros(tuple(shown.shape), dtype=shown.dtype))

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
                env[node] = _on_processor(operator.attrgetter(str(node.target))(module))
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                args, kwargs = sums.map_sums(_on_processor, (args, kwargs))
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
        flat = sums.sum_leaves((args, kwargs))
        decided = any(map(self.is_decided, flat))
        unknown = any(map(self.is_unknown, flat))
        if self.bound:
            reason = without_bound(node, name, args, kwargs, unknown)
            if reason:
                self.refuse(name, args, kwargs, reason)
        drawn = facts_of(name).kind == "random" and not any(isinstance(leaf, Sum) for leaf in flat)
        if drawn or "empty" in name:
            return pytree.tree_map(self._made, node.meta["val"])
        if name == "aten.sym_size" and isinstance(args[0], Sum):
            return args[0].values.shape[args[1]]
        if "_assert" in name:
            # (of types and shapes, which are other ones here)
            return None
        if decided and not any(isinstance(leaf, Sum) for leaf in flat):
            # elements that data selects from a tensor of the model are weights on paths
            args, kwargs = sums.map_sums(self._weight, (args, kwargs))
            if not any(isinstance(leaf, Sum) for leaf in sums.sum_leaves((args, kwargs))):
                found = self._plainly(node, name, args, kwargs)
                return pytree.tree_map(lambda leaf: self._result(leaf, not unknown), found)
        elif not any(isinstance(leaf, Sum) for leaf in flat):
            return self._plainly(node, name, args, kwargs)
        return self.passed(node, name, args, kwargs, unknown, decided)

    def _plainly(
        self, node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An operation on the model's tensors in double precision; large tensors that are only
        moved keep their type.
        """
        counts = name in COUNTED or (name == "aten.where" and len(args) == 1)
        if counts and any(map(self.is_decided, args)):
            self.refuse(name, args, kwargs, "data decide how many positions there are")
        large = any(
            isinstance(leaf, Tensor) and leaf.numel() > MANY for leaf in sums.sum_leaves(args)
        )
        target: Any = _functional(node.target)
        facts = facts_of(node)
        if facts.moves and facts.kind not in ("total", "transform") and large:
            return target(*args, **kwargs)
        own, named = sums.map_sums(sums.wide, (args, sums.double_dtype(kwargs)))
        try:
            return target(*own, **named)
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            pass
        # an operation with types of its own
        shown = [
            leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
            for leaf in sums.sum_leaves((node.args, node.kwargs))
        ]
        flat, spec = pytree.tree_flatten((args, kwargs))
        typed = [
            leaf.to(real.dtype) if isinstance(leaf, Tensor) and isinstance(real, Tensor) else leaf
            for leaf, real in zip(flat, shown, strict=True)
        ]
        own, named = pytree.tree_unflatten(typed, spec)
        try:
            return target(*own, **named)
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            self.refuse(name, args, kwargs, "its operands have other types here than in the model")

    def _result(self, leaf: Any, known: bool = False) -> Any:
        """A result that depends on data: floats start paths of value 1, other
        types become placeholders, perhaps with known contents.
        """
        if not isinstance(leaf, Tensor):
            return leaf
        return (
            Sum(torch.ones(leaf.shape, dtype=torch.float64))
            if leaf.is_floating_point() or leaf.is_complex()
            else self._decided(leaf, known)
        )

    def _made(self, shown: Any) -> Any:
        """Random numbers start paths of value 1; memory that nothing was written to is 0."""
        if not isinstance(shown, Tensor):
            return shown
        zeros = torch.zeros(tuple(shown.shape), dtype=shown.dtype)
        assert self.node is not None
        return self._result(zeros) if facts_of(self.node).kind == "random" else zeros

    def passed(
        self,
        node: fx.Node,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unknown: bool = False,
        decided: bool = False,
    ) -> Any:
        """Pass sums through an operation.

        Args:
            node: the operation.
            name: its name.
            args: its operands.
            kwargs: its keyword operands.
            unknown: whether it reads whole numbers or truth values that data decide.
            decided: the same, or those that the example inputs decide.
        """
        facts, run = facts_of(name), _functional(node.target)
        picks = (unknown and facts.kind in ("pick", "write", "part")) or (
            decided and facts.kind == "choice"
        )
        if facts.kind in NUMBERS:
            args = sums.map_sums(self.number, args)
        try:
            anywhere = self.anywhere(name, run, args) if picks else None
            if anywhere is not None:
                return anywhere
            # (sums over paths leave the range of small types before the numbers do)
            wide = sums.double_dtype(kwargs)
            found = None if picks else self.by_facts(node, facts, run, args, wide)
            if found is not None:
                return found
            if facts.kind == "attention" and self.fixed_ends:
                # (the rule does not say by what the products are divided)
                mixed = attended(node, args, kwargs, self.is_decided, self.p)
                if mixed is not None:
                    self.ends.append(mixed[0])
                    return self.kept(mixed[1], node.meta.get("val"))
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
            sums.sum_leaves((node.args, node.kwargs)), sums.sum_leaves((args, kwargs)), strict=False
        ):
            if isinstance(own, fx.Node):
                operands[names[own.name]] = value
        before, self.whole = self.whole, self.whole or node
        try:
            return self.graph(smaller, operands)
        finally:
            self.whole = before

    def by_rule(self, node: fx.Node, name: str, facts: Facts, args: Any, kwargs: Any) -> Any:
        """Pass sums through the rule of the operation."""
        if name == "aten.index_add":
            args, kwargs = self.scaled_source(args, kwargs)
        try:
            read = read_rule(
                node, name, args, kwargs, self.is_condition, self.captured.sources, self.exact_norms
            )
            ended = read.ended(self.p)
        except UnsupportedError:
            why = (
                "gates fix the scale of what they read"
                if facts.kind == "gated recurrence"
                else "too many paths"
            )
            return self.stopped(name, args, kwargs, why)
        entering = list(sums.each_sum((args, kwargs)))
        alone = facts.elementwise and len(entering) == 1 and entering[0] is args[0]
        slope = facts.slope if alone else None
        if ended and self.bound and slope is not None:
            return Sum(args[0].values * slope**self.p, args[0].log)
        if ended and not self.fixed_ends:
            pins = read.paths.pins
            why = pins[0].reason if pins else _NO_SUM.get(facts.kind, "not positively homogeneous")
            self.refuse(name, args, kwargs, why)
        self.ends += ended
        measured = None if ended else self._coefficients(node, facts, args, kwargs, read)
        if measured is not None:
            return measured
        if self.bound and _has_numbers(node) and (read.paths.restarts or read.paths.pairs):
            self.refuse(name, args, kwargs, "it has no largest slope")
        return pytree.tree_map(
            lambda leaf: self._decided(leaf) if isinstance(leaf, Tensor) else leaf,
            read.results(self.p),
            is_leaf=lambda leaf: isinstance(leaf, Sum),
        )

    def _coefficients(self, node: fx.Node, facts: Facts, args: Any, kwargs: Any, read: Read) -> Any:
        """The sums with the coefficients of an affine operation, of which a rule says nothing;
        ``None`` for other operations, and where data select elements.
        """
        if "embedding_bag" in operation_name(node.target):
            return self.bags(node, args, kwargs)
        if any(map(self.is_condition, sums.sum_leaves((args, kwargs)))):
            return None
        if not isinstance(node.meta.get("val"), Tensor):
            return None
        inner = sums.sum_leaves((node.args, node.kwargs))
        complexes = frozenset(
            i for i, one in enumerate(inner) if isinstance(one, fx.Node) and _is_complex(one)
        )
        found = AffineMap(_functional(node.target), args, kwargs, complexes)
        try:
            start = found.constant()
        except (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError):
            # (it does not compute in double precision: products of groups of rows)
            return None
        if start is None:
            return None
        constant = Sum(sums.absolute_power(start.abs(), self.p))
        if found.is_constant(start):
            return constant
        if facts.elementwise:
            return sums.added(found.by_element(start, self.p), constant)
        drawn = {i: value.abs() for i, value in found.drawn(2).items()}
        whole, alone = (found.at(each, absolute=True) for each in (drawn, {}))
        counted = read.only(1.0, list(drawn.values()), -math.inf)
        if not complexes and agree(whole - alone, counted.at(0.0)):
            # all coefficients are 1, or weights
            return sums.added(read.only(self.p, start=-math.inf), constant)
        return sums.added(found.by_unit_vectors(start, self.p), constant)

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
        node = self.whole or self.node
        assert node is not None
        if node in self.inside:
            self._end((args, kwargs))
            raise _Reached
        module, line = place(node)
        raise UnsupportedError(
            f"path_norm cannot pass '{name.removeprefix('aten.')}' (module"
            f" {module or 'at the top'}, {line or 'unknown line'}): {reason};"
            f" until={module or node.name!r} gives the norm of the part before it, and"
            " until='fixed' the norm of all paths that end where scales are fixed."
        )


def _on_processor(leaf: Any) -> Any:
    """Tensors, and devices for new ones, on the processor, where sums are; else the same."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


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


def _has_numbers(node: fx.Node) -> bool:
    """Whether some of the results are real or complex numbers."""
    shown = pytree.tree_leaves(node.meta.get("val"))
    return any(
        is_float_tensor(each) or each.is_complex() for each in shown if isinstance(each, Tensor)
    )


def _is_complex(node: fx.Node) -> bool:
    shown = node.meta.get("val")
    return isinstance(shown, Tensor) and shown.is_complex()


def _functional(target: Any) -> Callable[..., Any]:
    """An operation, or its out-of-place form if it writes into an operand."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target  # type: ignore[no-any-return]
    plain = getattr(torch.ops.aten, operation_name(target).removeprefix("aten.").rstrip("_"), None)
    result: Callable[..., Any] = plain if plain is not None else target
    return result
