"""The input sizes for which a graph is valid.

A graph is captured at the sizes of the example inputs. Samples, tokens and pixels share their
weights, so most results hold at any size. They may not if the example is too small to use every
weight fully: a table of positions is read in part, a recurrence has one step, taps of a kernel read
only padding, or the number of factors is the number of steps. If there is such a sign, the model is
captured again at larger sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pathspace.capture import capture
from pathspace.captured import Captured
from pathspace.errors import PathspaceError
from pathspace.inference.registry import operation_name
from pathspace.inputs import describe_inputs, ordinary
from pathspace.restored_globals import untouched
from pathspace.size_dry_run import Rehearsal
from pathspace.without_values import has_values, with_numbers

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# dimensions of input tensors: (number of the tensor, dimension)
Dims = tuple[tuple[int, int], ...]

# operation -> position of its dimension argument
APART = {
    "select": 1,
    "unbind": 1,
    "squeeze": 1,
    "split": 2,
    "chunk": 2,
    "split_with_sizes": 2,
    "tensor_split": 2,
}
RECURRENT = frozenset(["rnn_relu", "rnn_tanh", "lstm", "gru"])
# operations that single out a diagonal, which is everything at size 1
DIAGONAL = frozenset(["eye", "triu", "tril", "fill_diagonal", "diagonal_scatter"])
PARTS = frozenset(["slice", "select", "narrow"])
# operations after which different numbers may be the same
STEPS = frozenset(
    [
        *("ge", "gt", "le", "lt", "eq", "ne", "isin", "bucketize", "searchsorted"),
        *("floor_divide", "div", "floor", "trunc", "round", "ceil", "clamp", "clamp_min"),
        *("clamp_max", "clip", "relu", "sign", "minimum", "maximum", "remainder", "fmod", "where"),
        *("tril", "triu", "to", "bitwise_right_shift", "__rshift__"),
    ]
)
# elements of a tensor that is computed here
LARGEST = 1 << 22


def _name(node: fx.Node) -> str:
    return operation_name(node.target).removeprefix("aten.")


def _takes_apart(node: fx.Node) -> bool:
    """Whether an operation splits a first dimension of size 1, as loops over time
    and recurrent layers do.

    So does one that singles out a diagonal, as a comparison of all samples with all others does.
    """
    name = _name(node)
    if name in DIAGONAL:
        return True
    operand = node.args[0] if node.args else None
    shown = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not isinstance(shown, Tensor) or not shown.dim():
        return False
    if name in RECURRENT:
        return 1 in shown.shape[:-1]
    if name not in APART or shown.shape[0] != 1:
        return False
    dim = node.args[APART[name]] if len(node.args) > APART[name] else 0
    return dim in (0, -shown.dim())


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def thin(captured: Captured, inputs: Inputs) -> bool:
    """Whether a dimension of an input has size 1, so that the capture does not
    show what happens along it.

    A batch of size 1 does not count unless the model iterates over it.
    """
    shapes = [tensor.shape for tensor in _tensors(inputs)]
    if any(1 in shape[1:] for shape in shapes):
        return True
    calls = (node for node in captured.graph.graph.nodes if node.op == "call_function")
    return any(len(shape) and shape[0] == 1 for shape in shapes) and any(map(_takes_apart, calls))


@with_numbers()
def hides(captured: Captured) -> bool:
    """Whether the capture cannot show what happens to a value.

    It is empty, the only part into which it is split, a part of a buffer with only zeros, or the
    same number everywhere only because sizes are small, as ``arange(n) >= 4`` is.
    """
    held: dict[fx.Node, Tensor] = {}
    # parts of buffers, and numbers that are the same everywhere
    parts: set[fx.Node] = set()
    flat: list[fx.Node] = []
    for node in captured.graph.graph.nodes:
        shown = node.meta.get("val")
        if node.op == "placeholder":
            kind, name = captured.sources.get(node.name, ("", ""))
            value = captured.buffers.get(name) if kind == "buffer" else None
            if value is not None and value.layout == torch.strided and has_values(value):
                held[node] = value.detach()
                parts.add(node)
        if node.op != "call_function":
            continue
        # (a size that data decide is no number)
        if isinstance(shown, Tensor) and any(type(n) is int and not n for n in shown.shape):
            return True
        if isinstance(shown, list | tuple) and len(shown) == 1 and _name(node) in APART:
            return True
        value = computed(node, held)
        if value is None:
            continue
        held[node] = value
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if first is None or first not in held:
            continue
        if first in parts and _name(node) in PARTS:
            parts.add(node)
            if not bool(value.any()) and bool(held[first].any()):
                return True
        if _name(node) in STEPS and _is_flat_here(node, held[first], value):
            flat.append(node)
    # (a mask that is part of another mask has no effect of its own)
    return any(user not in held or _is_flat(held[user]) for node in flat for user in node.users)


def computed(node: fx.Node, held: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The result of an operation on numbers that do not depend on data.

    Args:
        node: the operation.
        held: what is known of other nodes.

    Returns:
        The result, or ``None`` if it depends on data, is random, large, or no tensor.
    """
    shown, target = node.meta.get("val"), node.target
    if not isinstance(shown, Tensor) or not isinstance(target, torch._ops.OpOverload):
        return None
    small = all(type(n) is int for n in shown.shape) and shown.numel() <= LARGEST
    vague = target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
    if not small or vague or "empty" in _name(node):
        return None
    if any(operand not in held for operand in node.all_input_nodes):
        return None
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), held.__getitem__)
    try:
        value = target(*args, **{k: v for k, v in kwargs.items() if k != "device"})
    except Exception:
        # (what cannot run here shows nothing)
        return None
    return value if isinstance(value, Tensor) and value.layout == torch.strided else None


def _is_flat_here(node: fx.Node, whole: Tensor, value: Tensor) -> bool:
    """Whether different numbers have become the same one, and larger sizes may change that: from
    zero, numbers that count sizes go upwards, and pass a lower bound for ever.
    """
    if value.numel() < 2 or not _is_flat(value) or _is_flat(whole):
        return False
    bounded = len(node.args) > 1 and isinstance(node.args[1], int | float)
    passed = {"ge": True, "gt": True, "le": False, "lt": False}.get(_name(node))
    upwards = bounded and passed is not None and bool((whole >= 0).all())
    return not (upwards and bool(value.reshape(-1)[0]) == passed)


def _is_flat(value: Tensor) -> bool:
    """Whether all elements are the same number."""
    return value.numel() < 2 or bool((value == value.reshape(-1)[0]).all())


def resized(inputs: Inputs, sizes: Mapping[tuple[int, int], int]) -> Inputs:
    """Inputs with other sizes of some dimensions: elements are cut off, or repeated from the start.

    Example:
        >>> import torch
        >>> resized(((torch.tensor([[3, 5]]),), {}), {(0, 1): 3})
        ((tensor([[3, 5, 3]]),), {})
    """
    leaves, spec = tree_flatten(inputs)
    number = -1
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        number += 1
        for dim in range(leaf.dim()):
            size = sizes.get((number, dim), leaf.shape[dim])
            if size != leaf.shape[dim]:
                leaves[i] = leaves[i].index_select(
                    dim, torch.arange(size, device=leaf.device) % leaf.shape[dim]
                )
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def linked_dims(inputs: Inputs, thin_only: bool) -> Iterator[tuple[int, list[Dims]]]:
    """Sizes, each with groups of dimensions that may vary together: all of that size,
    then those at each position.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for number, tensor in enumerate(_tensors(inputs)):
        for dim, size in enumerate(tensor.shape):
            if size == 1 or (size and not thin_only):
                found.setdefault(size, []).append((number, dim))
    for size, dims in found.items():
        apart: dict[int, list[tuple[int, int]]] = {}
        for number, dim in dims:
            apart.setdefault(dim, []).append((number, dim))
        yield (
            size,
            [tuple(dims), *([tuple(part) for part in apart.values()] if len(apart) > 1 else [])],
        )


def larger(runs: Callable[[Inputs], bool], inputs: Inputs, thin_only: bool) -> Inputs | None:
    """The inputs with every dimension enlarged that can vary.

    Args:
        runs: function that tells whether the model runs on inputs.
        inputs: example inputs, positional and by keyword.
        thin_only: enlarge only dimensions of size 1.

    Returns:
        Larger inputs, or ``None`` if the model accepts no other sizes.
    """
    sizes: dict[tuple[int, int], int] = {}

    def grown(dims: Dims, size: int) -> bool:
        for new in (4, 2) if size == 1 else (2 * size, size + 1):
            trial = sizes | dict.fromkeys(dims, new)
            if runs(resized(inputs, trial)):
                sizes.update(trial)
                return True
        return False

    for size, (every, *apart) in linked_dims(inputs, thin_only):
        if not grown(every, size):
            for dims in apart:
                grown(dims, size)
    return resized(inputs, sizes) if sizes else None


def recapture(
    model: nn.Module,
    inputs: Inputs,
    thin_only: bool,
    watch: AbstractContextManager[Any] | None = None,
) -> tuple[Captured | None, Inputs | None]:
    """The model captured at larger sizes, and these inputs; ``None`` twice if it
    runs only at its own sizes.
    """
    try:
        with untouched(model), torch.inference_mode(False), with_numbers():
            rehearsal = Rehearsal(model)
            other = larger(lambda trial: rehearsal.runs(*trial), ordinary(inputs), thin_only)
        return (None, None) if other is None else (capture(model, *other, watch=watch), other)
    except PathspaceError:
        # a model that cannot be copied or captured again keeps its first capture
        return None, None


def sentence(
    inputs: Inputs, others: Sequence[Inputs], looked: bool, unseen: Sequence[str] = ()
) -> str:
    """The inputs for which a graph was derived, in words."""
    text = f"inputs ({describe_inputs(*inputs)})"
    if others:
        text += ", and other sizes as captured at " + " and ".join(
            f"({describe_inputs(*other)})" for other in others
        )
    elif looked:
        return f"{text} only, because it was not captured at other sizes"
    else:
        text += ", and other sizes at which the model runs the same operations"
    if unseen:
        text += f"; which way {', '.join(unseen)} takes by size was seen at these sizes only"
    return text
