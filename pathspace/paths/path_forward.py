"""One forward pass of a captured graph on sums over paths: the weights are ``|w|^p``, the inputs
1, and the table of operations says how each operation passes the sums.

A copy and a function that is homogeneous of degree 1 keep a sum, a maximum adds those of its
operands, linear operations are run as they are. What the table does not settle is read from the
rule of the operation (:mod:`pathspace.paths.local_paths`), with coefficients that are measured.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..capture.captured import Captured, place
from ..errors import PathspaceError, UnsupportedError
from ..inference.lowering import decomposed
from ..inference.registry import RULES
from ..models.finite import expect_finite
from ..models.isolation import quiet
from ..models.values import require_values
from . import path_sums as sums
from .local_paths import LocalPaths
from .path_facts import Refused, Request, by_facts
from .path_sums import Chosen, OperationCall, Sum, Unknown, is_float

# kind of a homogeneous operation -> why it has no sum over paths
_NO_SUM = {
    "bag": "bags divide or weigh rows, or take several at once",
    "power": "only powers with a positive integer as exponent are sums over paths",
    "quotient": "a quotient is not a sum over paths",
}
# kinds of operations that compute with whole numbers as with real ones
_NUMBERS = ("sum", "combination", "quotient", "concatenation")
# the positions of what is not zero, as many as there are
_COUNTS = ("aten.nonzero", "aten.nonzero_numpy", "aten.argwhere")
# kinds of operations that are taken step by step
_STEPS = ("recurrence", "gated recurrence", "attention")
# what an operation raises that does not take these arguments
_WRONG = (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError)


class _Reached(Exception):
    """All tensors in which paths end have been computed."""


def ends_of_paths(request: Request) -> list[Sum]:
    """The sums where paths end."""
    captured = request.captured
    places = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
    try:
        entering = [_entering(captured, node) for node in places]
        found = PathSums(captured.graph, request).run(*entering)
    except _Reached:
        return request.ends
    flat = captured.without_updates(pytree.tree_leaves(found))
    real = [leaf for leaf in flat if isinstance(leaf, Sum) or is_float(leaf)]
    return [*request.ends, *(sums.as_sum(leaf, request.p) for leaf in real)]


def _entering(captured: Captured, node: fx.Node) -> Any:
    kind, name = captured.sources.get(node.name, ("input", node.name))
    # (of inputs there are none)
    own: Any = getattr(captured, f"{kind}s", {}).get(name)
    if own is not None:
        require_values("path_norm", [("a tensor of the model", own)])
        if kind == "parameter" and node.users:
            expect_finite("path_norm", name, own)
        # (a tensor that replaces a parameter keeps its gradient)
        return (own.detach() if isinstance(own, nn.Parameter) else own).cpu()
    shown = node.meta.get("val")
    if not isinstance(shown, Tensor):
        return shown
    if is_float(shown):
        return Sum.start(shown.shape)
    example = captured.whole.get(node.name)
    if example is not None:
        return example.clone().cpu().as_subclass(Chosen)
    return _zeros(shown).as_subclass(Unknown)


class PathSums(fx.Interpreter):
    """Interprets a graph, perhaps a decomposition of ``whole``, on sums over paths."""

    def __init__(
        self, module: fx.GraphModule, request: Request, whole: fx.Node | None = None
    ) -> None:
        super().__init__(module)
        self.request, self.p, self.whole = request, request.p, whole
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        """The result of one node; the last one in which paths end ends the pass."""
        self.node = n
        found = super().run_node(n)
        if n in self.request.exits:
            every = pytree.tree_leaves(found)
            self.request.ends.extend(leaf for leaf in every if isinstance(leaf, Sum))
            self.request.exits.discard(n)
            if not self.request.exits:
                raise _Reached
        return found

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A tensor or a graph that the graph holds."""
        return _on_processor(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Apply one operation as usual, or to sums by its properties or its rule."""
        if target is operator.getitem:
            return args[0][args[1]]
        call = OperationCall(self.node, tuple(args), dict(kwargs)).mapped(_on_processor)
        try:
            return self.applied(call)
        except Refused as refused:
            node = self.whole or call.node
            if node in self.request.inside:
                # (paths end before it)
                self.request.ends.extend(call.entering)
                raise _Reached from refused
            module, line = place(node)
            raise UnsupportedError(
                f"path_norm cannot pass '{call.name.removeprefix('aten.')}' (module"
                f" {module or 'at the top'}, {line or 'unknown line'}): {refused};"
                f" until={module or node.name!r} gives the norm of the part before it, and"
                " until='fixed' the norm of all paths that end where scales are fixed."
            ) from refused

    def applied(self, call: OperationCall) -> Any:
        """What an operation makes of its operands."""
        kind, decided = call.facts.kind, call.has(Chosen)
        if self.request.bound:
            _expect_slope(call)
        if "empty" in call.name:
            # (memory that nothing was written to)
            return pytree.tree_map_only(Tensor, _zeros, call.shown)
        if decided and not call.has(Sum) and any(map(is_float, call.leaves)):
            # elements that data selects from a tensor of the model are weights on paths
            call = call.mapped(lambda leaf: sums.as_sum(leaf, self.p) if is_float(leaf) else leaf)
        values = (*call.leaves, *pytree.tree_leaves(call.shown))
        complex_numbers = any(isinstance(each, Tensor) and each.is_complex() for each in values)
        if complex_numbers and (call.has(Sum) or decided) and kind != "size":
            return self.stopped(call, "it computes with complex numbers")
        if call.has(Sum):
            if kind != "size":
                return self.passed(call)
            # (checks of types and shapes, which are other ones here, have no result)
            return call.run(call.args[0].values, *call.args[1:]) if "size" in call.name else None
        if kind == "random":
            return pytree.tree_map(self._started, call.shown)
        found = self._plainly(call)
        return pytree.tree_map(self._started, found) if decided else found

    def _plainly(self, call: OperationCall) -> Any:
        counts = call.name in _COUNTS or (call.name == "aten.where" and len(call.args) == 1)
        if counts and call.has(Chosen):
            raise Refused("data decide how many positions there are")
        if call.facts.kind in ("movement", "part", "split"):
            return call.run(*call.args, **call.kwargs)
        wide = call.mapped(sums.wide)
        try:
            return call.run(*wide.args, **wide.kwargs)
        except _WRONG as error:
            raise Refused("its operands have other types here than in the model") from error

    def _started(self, leaf: Any) -> Any:
        """What data decide: numbers start paths of value 1, positions are unknown."""
        if is_float(leaf):
            return Sum.start(leaf.shape)
        known = isinstance(leaf, Chosen) or not isinstance(leaf, Tensor)
        return leaf if known else _zeros(leaf).as_subclass(Unknown)

    def passed(self, call: OperationCall) -> Any:
        """Pass sums through an operation."""
        if call.facts.kind in _NUMBERS:
            call = call.mapped(self._number)
        try:
            # (sums over paths leave the range of small types before the numbers do)
            wide = OperationCall(call.node, call.args, pytree.tree_map(sums.wide, call.kwargs))
            found = by_facts(wide, self.request)
            if found is not None:
                return found
            if call.name in RULES and call.facts.kind not in _STEPS:
                return self.by_rule(call)
        except PathspaceError:
            raise
        except _WRONG:
            # the rule does not support these arguments: torch may decompose the operation
            pass
        # (with the steps that the operation is defined by, and not the processor's own kernel)
        with quiet(), sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            smaller = decomposed(call.node)
        if smaller is None:
            return self.stopped(call, "no rule says what it does to paths")
        if "recurrence" in call.facts.kind:
            # (the first state is on paths, and not computed with the weights that read it)
            state = pytree.tree_map(
                lambda leaf: sums.as_sum(leaf, self.p) if is_float(leaf) else leaf, call.args[1]
            )
            call = OperationCall(call.node, (call.args[0], state, *call.args[2:]), call.kwargs)
        # (the text of a node is its name)
        own = map(str, pytree.tree_leaves((call.node.args, call.node.kwargs)))
        named = dict(zip(own, call.leaves, strict=False))
        places = [node for node in smaller.graph.nodes if node.op == "placeholder"]
        inner = PathSums(smaller, self.request, self.whole or call.node)
        return inner.run(*(named[node.name] for node in places))

    def _number(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or is_float(leaf):
            return leaf
        return Sum.start(leaf.shape) if isinstance(leaf, Chosen) else leaf.double()

    def by_rule(self, call: OperationCall) -> Any:
        """Pass sums through the rule of the operation."""
        facts, request, p = call.facts, self.request, self.p
        if facts.kind == "bag":
            return self.stopped(call, _NO_SUM["bag"])
        try:
            read = LocalPaths(call, request.captured.sources, request.exact_norms)
        except UnsupportedError:
            return self.stopped(call, "too many paths")
        ended = read.ended(p)
        if ended and request.bound and facts.slope is not None and facts.elementwise:
            x, *others = call.entering
            if x is call.args[0] and not others:
                return Sum.of(x.values * facts.slope**p, x.log)
        if ended and not request.fixed_ends:
            pins = read.pins
            why = pins[0].reason if pins else _NO_SUM.get(facts.kind, "not positively homogeneous")
            raise Refused(why)
        request.ends.extend(ended)
        measured = None if ended else self._measured(call)
        if measured is not None:
            return measured
        if facts.kind == "write" and call.given.get("alpha", 1) != 1:
            # (the edges of a rule have no factor)
            return self.stopped(call, "it multiplies by a factor and writes where data decide")
        real = any(map(is_float, pytree.tree_leaves(call.shown)))
        if request.bound and real and (read.restarts or read.pairs):
            raise Refused("it has no largest slope")
        return read.results(p)

    def _measured(self, call: OperationCall) -> Any:
        data = call.facts.kind == "random" or any(map(sums.is_condition, call.leaves))
        if data or not isinstance(call.shown, Tensor):
            return None
        found = sums.AffineMap(call, self.p)
        try:
            moves = found.moves()
        except _WRONG:
            # (it does not compute in double precision: products of groups of rows)
            return None
        if moves:
            return sums.moved_sums(call.mapped(sums.wide), self.p, True)
        return None if moves is None else found.sums()

    def stopped(self, call: OperationCall, reason: str) -> Any:
        """End paths in all operands of an operation, if they may end there."""
        if not self.request.fixed_ends:
            raise Refused(reason)
        self.request.ends.extend(call.entering)
        return pytree.tree_map(self._started, call.shown)


def _expect_slope(call: OperationCall) -> None:
    """Refuse an operation without a largest slope, unless its rule decides."""
    kind, given = call.facts.kind, call.given
    if isinstance(call.shown, Tensor) and not is_float(call.shown):
        return
    if call.has(Unknown):
        raise Refused("where a comparison or a position changes, its results jump")
    draws = given.get("train", given.get("training", False)) and given.get("p", 1) != 0
    if kind == "random" or (kind in ("dropout", "activation") and draws):
        raise Refused("it draws random numbers; use model.eval()")
    if not call.has(Sum):
        return
    if kind == "power" and given.get("exponent", *call.facts.degree[:1]) != 1:
        raise Refused("a power has no largest slope")
    orders = [v for k, v in given.items() if k in ("p", "ord") and sums.is_number(v)]
    if kind == "norm" and min(orders, default=2) < 1:
        raise Refused("a norm of an order below 1 has no largest slope")
    if "softplus" in call.name and given["threshold"] < 20:
        raise Refused("it jumps at its threshold, which is below the default of 20")


def _zeros(leaf: Tensor) -> Tensor:
    return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype)


def _on_processor(leaf: Any) -> Any:
    """Tensors, and devices for new ones, on the processor, where sums are; else the same."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf
