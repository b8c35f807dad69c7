"""Which elements of a captured graph reach an output: one pass from the outputs to the inputs.

A model can compute values that it never reads, for example a sum over all tokens of which only the
first is classified. Such elements restrict no scale, and weights that only they depend on lie on no
path. An element counts as live unless it certainly has no effect: an operation without a case below
needs all elements of its operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .folding import CHOICES, FACTORS, Constants
from .registry import facts_of, named_arguments, operation_name
from .rules.normalization import WITH_STATISTICS
from .values import NEUTRAL, Weight, compress, constant, distinct

# all elements, none, or a mask of them
Live = bool | Tensor
Operands = Iterable[tuple[fx.Node, Live]]

# of larger tensors all elements are live
LARGEST = 1 << 24
# kinds of operations that can leave out elements even if their whole result is live
LEAVE_OUT = frozenset(["part", "split", "pick", "write", "upsampling", "average pooling"])
# operations with further arguments that change gradients, but not values -> number of the others
ARGUMENTS = {"aten.embedding": 2}
# in evaluation mode it does not write its statistics, and acts on every element alone
FROZEN = "aten.batch_norm"
# operations that read only the sizes of their operands
SIZES = frozenset(
    f"aten.{name}"
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
                 "randint_like", "new_zeros", "new_ones", "new_full", "new_empty",
                 "new_empty_strided")
)  # fmt: skip


def live_elements(module: fx.GraphModule, values: Mapping[str, Any]) -> dict[str, Live]:
    """The operations and placeholders of which some elements reach no output.

    Args:
        module: a captured graph, whose nodes have fake results in ``meta["val"]``.
        values: placeholder name -> activation; those with a known value can be indices.

    Returns:
        Name of a node -> mask of the elements that reach an output, or ``False`` if none does.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> first = make_fx(lambda x: torch.relu(x)[:, 0], tracing_mode="fake")(torch.randn(1, 3))
        >>> {
        ...     name: mask.tolist()
        ...     for name, mask in live_elements(first, {}).items()
        ...     if name == "relu"
        ... }
        {'relu': [[True, False, False]]}
    """
    backward = _Backward(module, values)
    # (in any mode of the caller)
    with torch.inference_mode(False), torch.enable_grad():
        for node in reversed(module.graph.nodes):
            if node.op == "output" or (node.op == "call_function" and _acts(node)):
                backward.mark((operand, True) for operand in node.all_input_nodes)
            elif node.op == "call_function":
                backward.visit(node)
            elif node.op == "placeholder":
                backward.leave(node)
    return backward.found


def without_dead(ids: Any, live: Live) -> Any:
    """Activations with exact zeros, which can have any scale, in place of the
    elements that reach no output.
    """
    if not isinstance(ids, Tensor) or live is True or hasattr(ids, "base"):
        return ids
    if live is False:
        out = constant(ids.shape, NEUTRAL)
    else:
        out = compress(torch.where(distinct(live), distinct(ids), NEUTRAL).expand(ids.shape))
    for name in ("known", "buffer_name"):
        if hasattr(ids, name):
            setattr(out, name, getattr(ids, name))
    return out


class _Backward:
    """The pass through one graph.

    Attributes:
        found: what :func:`live_elements` returns.
    """

    def __init__(self, module: fx.GraphModule, values: Mapping[str, Any]) -> None:
        self.values, self.constants = values, Constants(module, values)
        self.found: dict[str, Live] = {}
        self._live: dict[fx.Node, Live] = {}
        # operation with several results -> number of the result -> its live elements
        self._parts: dict[fx.Node, dict[int, Live]] = {}

    def mark(self, operands: Operands) -> None:
        """Add live elements of operands."""
        for operand, live in operands:
            self._live[operand] = _either(self._live.get(operand, False), live)

    def leave(self, node: fx.Node) -> None:
        """Keep what is found for a placeholder, after all operations that read it."""
        live = self._live.get(node, False)
        if live is not True and _is_fixed(node.meta.get("val")):
            self.found[node.name] = live

    def visit(self, node: fx.Node) -> None:
        """Mark the operands of one operation, after all operations that read its result."""
        live = self._live.get(node, False)
        parts = {} if live is True else self._parts.get(node, {})
        if parts:
            live = any(part is not False for part in parts.values())
        if live is not True:
            self.found[node.name] = live
        if live is False:
            return
        if node.target is operator.getitem:
            source, number = node.args
            results = self._parts.setdefault(source, {})  # type: ignore[arg-type]
            results[number] = _either(results.get(number, False), live)  # type: ignore[index, arg-type]
            return
        whole = live is True and not parts
        if (
            whole
            and not _leaves_out(node.target)
            and not (_is_sum_of_products(node) and self.constants.zeros(node))
        ):
            self._live.update(dict.fromkeys(node.all_input_nodes, True))
            return
        operands = self._operands(node, live, parts)
        self.mark(
            [(operand, True) for operand in node.all_input_nodes] if operands is None else operands
        )

    def _operands(self, node: fx.Node, live: Live, parts: Mapping[int, Live]) -> Operands | None:
        """The live elements of the operands of an operation, or ``None``
        if it needs all of them.
        """
        name, facts = operation_name(node.target), facts_of(node)
        if not all(_is_fixed(operand.meta.get("val")) for operand in node.all_input_nodes):
            return None
        if name in SIZES:
            return []
        if name in WINDOWS:
            return _under_windows(node, live)
        if (left := self.constants.leaves(node)) is not None:
            shown = node.meta["val"].shape
            return [
                (operand, fitted(_both(live, kept, shown), operand.meta["val"].shape))
                for operand, kept in left
                if isinstance(operand, fx.Node)
            ]
        # (a factor of what is added, an option, can be negative)
        positive = facts.coefficients != "real" or (facts.kind == "write" and not node.kwargs)
        if facts.linear == "jointly" and positive and not facts.elementwise:
            crops = facts.kind == "padding" and any(
                isinstance(n, int) and n < 0 for n in pytree.tree_leaves(node.args)
            )
            shown = node.meta["val"]
            if (
                facts.kind == "split"
                and len(parts) == len(shown)
                and all(part is True for part in parts.values())
            ):
                return None
            return (
                self._transposed(node, live, parts)
                if live is not True or crops or facts.kind in LEAVE_OUT
                else None
            )
        if _is_sum_of_products(node) and self.constants.zeros(node):
            return self._transposed(node, live, parts)
        if isinstance(live, bool):
            return None
        if name in MIXING:
            return MIXING[name](node, live)
        shapes = [(operand, operand.meta["val"].shape) for operand in node.all_input_nodes]
        return (
            [(operand, fitted(live, shape)) for operand, shape in shapes]
            if facts.elementwise
            else None
        )

    def _transposed(self, node: fx.Node, live: Live, parts: Mapping[int, Live]) -> Operands | None:
        """The transpose of a linear map with coefficients that are 0 or positive, applied
        to the mask of its result.

        In a sum of products, constants and the other operands are the coefficients.
        """
        operands, products = node.all_input_nodes, _is_sum_of_products(node)
        known = {operand: self.constants.value(operand) for operand in operands}
        data = [operand for operand in operands if operand.meta["val"].is_floating_point()]
        if products:
            data = [operand for operand in data if known[operand] is None]
        large = sum(operand.meta["val"].numel() for operand in operands) > LARGEST
        if large or all(operand.op == "get_attr" or self._is_weight(operand) for operand in data):
            return None
        sizes = {operand: operand.meta["val"].shape for operand in data}
        if live is True and facts_of(node).kind == "average pooling":
            # (the same for every channel)
            rank = int(operation_name(node.target)[-2])
            sizes = {
                one: torch.Size((1,) * (len(shape) - rank)) + shape[-rank:]
                for one, shape in sizes.items()
            }
        given: dict[fx.Node, Any] = {
            operand: torch.full(size, float(products), dtype=torch.float32)
            for operand, size in sizes.items()
        }
        for operand, value in known.items():
            if operand not in given and value is not None:
                wide = value.expand(operand.meta["val"].shape)
                given[operand] = (wide != 0).float() if products else wide
        if len(given) < len(operands):
            return None
        try:
            inputs = [given[operand].requires_grad_() for operand in data]
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
            args = args[: ARGUMENTS.get(operation_name(node.target))]
            # (with signs, an element that is read twice could count as one that is not read)
            signed: dict[str, Any] = {k: v for k, v in kwargs.items() if k in ("alpha", "beta")}
            kwargs = {**kwargs, **{k: abs(v) for k, v in signed.items()}}
            results = pytree.tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
            masks = [
                _mask(parts.get(i, False) if parts else live, one.shape)
                for i, one in enumerate(results)
            ]
            found = torch.autograd.grad(
                results, inputs, [mask.float() for mask in masks], allow_unused=True
            )
        except Exception:
            # (an operation that cannot run here, for example because it writes into its operand)
            return None
        marks: dict[fx.Node, Live] = dict.fromkeys(operands, True)
        for operand, grad in zip(data, found, strict=True):
            marks[operand] = (
                False if grad is None else _short((grad != 0).expand(operand.meta["val"].shape))
            )
        return marks.items()

    def _is_weight(self, operand: fx.Node) -> bool:
        return operand.op == "placeholder" and isinstance(self.values.get(operand.name), Weight)


def _is_sum_of_products(node: fx.Node) -> bool:
    facts = facts_of(node)
    return facts.linear == "each" and facts.kind == "contraction"


def _leaves_out(target: Any) -> bool:
    """Whether an operation may leave out elements of its operands, although
    its whole result is used.
    """
    name, kind = operation_name(target), facts_of(target).kind
    if name.startswith("aten.adaptive_avg_pool"):
        # (these windows cover their operand, whatever its size)
        return False
    return (
        name in SIZES | WINDOWS | FACTORS.keys() | CHOICES or kind in LEAVE_OUT or kind == "padding"
    )


def _acts(node: fx.Node) -> bool:
    """Whether an operation may have an effect besides its results, or has
    other results than tensors.
    """
    shown = node.meta.get("val")
    if node.target is operator.getitem:
        return not (
            isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int) and _is_fixed(shown)
        )
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    name = operation_name(node.target)
    if name in WITH_STATISTICS and not (name == FROZEN and node.args[5] is False):
        return True
    leaves = pytree.tree_leaves(shown)
    return not leaves or not all(map(_is_fixed, leaves))


def _is_fixed(shown: Any) -> bool:
    """Whether a node's result is a tensor whose sizes do not depend on data."""
    return isinstance(shown, Tensor) and all(isinstance(size, int) for size in shown.shape)


def _either(first: Live, second: Live) -> Live:
    if first is True or second is True:
        return True
    if isinstance(first, bool) or isinstance(second, bool):
        return second if first is False else first
    return _short(first | second)


def _short(mask: Tensor) -> Live:
    """A mask, or whether all or no elements are in it."""
    small = compress(mask)
    first = bool(distinct(small).any())
    return first if not first or bool(distinct(small).all()) else small


def _mask(live: Live, shape: torch.Size) -> Tensor:
    return live if isinstance(live, Tensor) else torch.tensor(live).expand(shape)


def _both(live: Live, kept: Tensor | None, shape: torch.Size) -> Tensor:
    """The elements of a result that are live and that a constant keeps."""
    one, other = (_mask(part if part is not None else True, shape) for part in (live, kept))
    return (distinct(one.expand(shape)) & distinct(other.expand(shape))).expand(shape)


def fitted(mask: Tensor, shape: torch.Size) -> Live:
    """The mask of an operand that was broadcast to the mask's shape."""
    while mask.dim() > len(shape):
        mask = mask.any(0)
    for dim, size in enumerate(shape):
        if size == 1 < mask.shape[dim]:
            mask = mask.any(dim, keepdim=True)
    return _short(mask)


def _others(node: fx.Node, marks: dict[fx.Node, Live]) -> Operands:
    """All elements of the operands that have no mask, or that are given twice
    (a matrix times itself).
    """
    given = [
        leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)
    ]
    return [
        (one, marks.get(one, True) if given.count(one) == 1 else True)
        for one in node.all_input_nodes
    ]


def _linear(node: fx.Node, live: Tensor) -> Operands | None:
    x: Any = node.args[0]
    shape = x.meta["val"].shape
    # (a weight can be one vector)
    rows = live.any(-1, keepdim=True) if live.dim() == len(shape) else live.unsqueeze(-1)
    return _others(node, {x: _short(rows.expand(shape))})


def _matrix_product(node: fx.Node, live: Tensor) -> Operands | None:
    """``x @ y`` and ``b + x @ y``."""
    *bias, x, y = node.args
    first, second = (operand.meta["val"].shape for operand in (x, y))  # type: ignore[union-attr]
    if len(first) < 2:
        return None
    marks: dict[Any, Live] = {one: fitted(live, one.meta["val"].shape) for one in bias}  # type: ignore[union-attr]
    if len(second) == 1:
        return _others(node, marks | {x: _short(live.unsqueeze(-1).expand(first))})
    rows = live.any(-1, keepdim=True).expand(*live.shape[:-1], first[-1])
    columns = live.any(-2, keepdim=True).expand(*live.shape[:-2], second[-2], live.shape[-1])
    return _others(node, marks | {x: fitted(rows, first), y: fitted(columns, second)})


def _along(dims: Callable[[Any], Iterable[int]]) -> Callable[[fx.Node, Tensor], Operands | None]:
    """An operation in which the elements along some dimensions of its first
    operand depend on each other.
    """

    def operands(node: fx.Node, live: Tensor) -> Operands:
        for dim in dims(node):
            live = live.any(dim, keepdim=True).expand(live.shape)
        return _others(node, {node.args[0]: _short(live)})  # type: ignore[dict-item]

    return operands


def _reduced(node: fx.Node, live: Tensor) -> Operands | None:
    """An operation that leaves one element of the elements along some dimensions."""
    given = named_arguments(node.target, node.args, node.kwargs)
    x: Any = node.args[0]
    shape, dims = x.meta["val"].shape, given.get("dim")
    if not given.get("keepdim", False):
        every = (
            range(len(shape))
            if dims in (None, [])
            else [dim % len(shape) for dim in pytree.tree_leaves(dims)]
        )
        for dim in sorted(every):
            live = live.unsqueeze(dim)
    return _others(node, {x: _short(live.expand(shape))})


def _attention(node: fx.Node, live: Tensor) -> Operands | None:
    """Every query is read by its row of the result, keys and values by all rows."""
    query, key, value = node.args[:3]
    shapes = [operand.meta["val"].shape for operand in (query, key, value)]  # type: ignore[union-attr]
    if len({shape[:-2] for shape in shapes}) > 1:
        return None
    row = live.any(-1, keepdim=True)
    every = row.any(-2, keepdim=True)
    masks = [
        _short(mask.expand(shape)) for mask, shape in zip((row, every, every), shapes, strict=True)
    ]
    return _others(node, dict(zip((query, key, value), masks, strict=True)))  # type: ignore[arg-type]


def _under_windows(node: fx.Node, live: Live) -> Operands | None:
    """A convolution reads the places under its windows; a stride, or the crop of a
    transposed one, leaves some out.
    """
    x, weight, _, *options = (*node.args, None)[: max(len(node.args), 3)]
    shape, size = x.meta["val"].shape, weight.meta["val"].shape[2:]  # type: ignore[union-attr]
    transposed = operation_name(node.target) in TRANSPOSED
    # (a transposed convolution drops what its padding covers)
    whole = options[1:2] if transposed else options[:1]
    if node.kwargs or (live is True and set(pytree.tree_leaves(whole)) <= {0 if transposed else 1}):
        return None
    if live is True and not transposed:
        met = _met_by_windows(node, size)
        return None if isinstance(met, bool) else _others(node, {x: _short(met.expand(shape))})  # type: ignore[dict-item]
    places = torch.zeros(1, *shape[-len(size) :]).float().requires_grad_()
    # (one channel has no groups)
    options = (
        [*options[:3], *([1] if options[3:] else []), *options[4:]] if transposed else options[:3]
    )
    result = node.target(places, torch.ones(1, 1, *size).float(), None, *options)  # type: ignore[operator]
    mask = _mask(live, result.shape).flatten(0, -len(size) - 1).any(0)
    (found,) = torch.autograd.grad(result, places, mask.expand_as(result).float())
    return _others(node, {x: _short((found[0] != 0).expand(shape))})  # type: ignore[dict-item]


def _met_by_windows(node: fx.Node, size: torch.Size) -> Live:
    """The places of an operand that the windows of a convolution meet, of a shape that
    broadcasts to the operand's.
    """
    given: tuple[Any, ...] = (*node.args[3:6], *([1], [0], [1])[len(node.args[3:6]) :])
    steps, margins, holes = (given[0], [0] if isinstance(given[1], str) else given[1], given[2])
    places, results = (
        shown.shape[-len(size) :]
        for shown in (node.args[0].meta["val"], node.meta["val"])  # type: ignore[union-attr]
    )
    met: Live = True
    for dim, (width, place, result) in enumerate(zip(size, places, results, strict=True)):
        along = _met_along(
            place, result, width, *(each[dim % len(each)] for each in (steps, margins, holes))
        )
        if along is not None:
            met = met & along.reshape([-1 if d == dim else 1 for d in range(len(size))])
    return met


@cache
def _met_along(
    places: int, results: int, width: int, step: int, margin: int, hole: int
) -> Tensor | None:
    """The places of one dimension that windows meet, or ``None`` if they meet all."""
    seen = torch.arange(results).mul(step).unsqueeze(1) + torch.arange(width).mul(hole) - margin
    met = torch.zeros(places, dtype=torch.bool)
    met[seen[(seen >= 0) & (seen < places)]] = True
    return None if bool(met.all()) else met


# operations whose operands are read along some dimensions only
MIXING: dict[str, Callable[[fx.Node, Tensor], Operands | None]] = {
    "aten.linear": _linear,
    **dict.fromkeys(
        ("aten.matmul", "aten.mm", "aten.mv", "aten.bmm", "aten.addmm", "aten.baddbmm"),
        _matrix_product,
    ),
    **dict.fromkeys(
        ("aten.softmax", "aten.log_softmax", "aten._softmax"), _along(lambda node: [node.args[1]])
    ),
    **dict.fromkeys(
        ("aten.layer_norm", "aten.rms_norm"), _along(lambda node: range(-len(node.args[1]), 0))
    ),
    **dict.fromkeys(("aten.amax", "aten.amin", "aten.var", "aten.std", "aten.logsumexp"), _reduced),
    **dict.fromkeys(("aten.linalg_vector_norm", "aten.norm"), _reduced),
    "aten.scaled_dot_product_attention": _attention,
    # (these have numbers for each channel)
    **dict.fromkeys(("aten.prelu", FROZEN), _along(lambda node: [])),
}
TRANSPOSED = frozenset(f"aten.conv_transpose{rank}d" for rank in (1, 2, 3))
WINDOWS = TRANSPOSED | {f"aten.conv{rank}d" for rank in (1, 2, 3)}
