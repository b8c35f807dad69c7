"""The input sizes for which a graph is valid.

A graph is captured at the sizes of the example inputs. Samples, tokens and pixels share their
weights, so the scales are those at all sizes at which the model runs the same operations. One
capture does not decide where the example is too small to use every weight: a table of positions is
read in part, or a recurrence has one step, or where the entries of a table have scales of their
own, which other sizes may join. Then the model is captured once more, at other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import PathspaceError
from ..models.inputs import Inputs, describe_inputs, ordinary
from ..models.isolation import untouched
from ..models.values import with_numbers
from .capture import capture
from .captured import Captured, named_arguments
from .tracer import FakeModel
from .writes import name_of

# operations that take a tensor apart, or put it together, along dimensions
ALONG = frozenset(
    "select unbind squeeze mean sum prod amax amin max min var std median logsumexp softmax"
    " log_softmax cumsum cumprod sort split chunk split_with_sizes tensor_split norm"
    " linalg_vector_norm".split()
)
PRODUCTS = frozenset(["matmul", "mm", "bmm"])
RECURRENT = frozenset(["rnn_relu", "rnn_tanh", "lstm", "gru"])
# operations that single out a diagonal, which is everything at size 1
DIAGONAL = frozenset(["eye", "triu", "tril", "fill_diagonal", "diagonal_scatter"])


def _goes_along(node: fx.Node) -> bool:
    """Whether an operation splits a first dimension of size 1, as loops over time
    and recurrent layers do, or compares or adds up what is there.

    So does one that singles out a diagonal, as a comparison of all samples with all others does,
    and a product that sums over a dimension of size 1.
    """
    name = name_of(node)
    if name in DIAGONAL:
        return True
    if name == "einsum":
        terms, _, result = str(node.args[0]).replace(" ", "").partition("->")
        operands: Any = node.args[1]
        return any(
            term[:1] not in result and operand.meta["val"].shape[0] == 1
            for term, operand in zip(terms.split(","), operands, strict=True)
        )
    operand = node.args[0] if node.args else None
    shown = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not isinstance(shown, Tensor) or not shown.dim():
        return False
    if name in PRODUCTS:
        return shown.shape[-1] == 1
    if name in RECURRENT:
        return 1 in shown.shape[:-1]
    if name not in ALONG or shown.shape[0] != 1:
        return False
    dims = named_arguments(node.target, node.args, node.kwargs).get("dim")
    every = [dims] if isinstance(dims, int) else dims or [0]
    return any(dim in (0, -shown.dim()) for dim in every)


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def thin(captured: Captured, inputs: Inputs) -> bool:
    """Whether a dimension of an input has size 1, so that the capture does not show what happens
    along it; a batch of one sample does not count unless an operation goes along it.
    """
    shapes = [tensor.shape for tensor in _tensors(inputs)]
    if any(1 in shape[1:] for shape in shapes):
        return True
    calls = (node for node in captured.graph.graph.nodes if node.op == "call_function")
    return any(len(shape) and shape[0] == 1 for shape in shapes) and any(map(_goes_along, calls))


def resized(inputs: Inputs, sizes: Mapping[tuple[int, int], int]) -> Inputs:
    """Inputs with other sizes of some dimensions: cut off, or repeated from the start."""
    leaves, spec = tree_flatten(inputs)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for number, i in enumerate(tensors):
        for dim, old in enumerate(leaves[i].shape):
            size = sizes.get((number, dim), old)
            if size != old:
                places = torch.arange(size, device=leaves[i].device) % old
                leaves[i] = leaves[i].index_select(dim, places)
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


# how much the sizes of inputs may grow: to twice the size, by one, or not at all
GROWTHS = (2, 1, 0)


def other_sizes(
    runs: Callable[[Inputs], bool], inputs: Inputs, thin_only: bool, growth: int = 2
) -> Inputs | None:
    """The inputs with every dimension (with ``thin_only``, of size 1) enlarged that can be, and
    with one less where they cannot; ``None`` if the model ``runs`` on no other sizes.
    """
    sizes: dict[tuple[int, int], int] = {}
    # dimensions of equal size may be the same one
    alike: dict[int, list[tuple[int, int]]] = {}
    for number, tensor in enumerate(_tensors(inputs)):
        for dim, size in enumerate(tensor.shape):
            if size == 1 or (size and not thin_only):
                alike.setdefault(size, []).append((number, dim))

    def grown(dims: list[tuple[int, int]], size: int) -> bool:
        more = ((4, 2) if size == 1 else (2 * size, size + 1))[len(GROWTHS) - 1 - growth :]
        # (a size of 1 would hide more than it shows)
        for new in (*more, *((size - 1,) if size > 2 else ())):
            trial = sizes | dict.fromkeys(dims, new)
            if runs(resized(inputs, trial)):
                sizes.update(trial)
                return True
        return False

    for size, dims in alike.items():
        places = dict.fromkeys(dim for _, dim in dims)
        if not grown(dims, size) and len(places) > 1:
            for place in places:
                grown([(number, dim) for number, dim in dims if dim == place], size)
    return resized(inputs, sizes) if sizes else None


def recapture(
    model: nn.Module, inputs: Inputs, thin_only: bool, growth: int
) -> tuple[Captured, Inputs] | None:
    """The model captured at :func:`other_sizes`, and these; ``None`` if it runs at no others."""
    try:
        with untouched(model), torch.inference_mode(False), with_numbers():
            rehearsal = FakeModel(model, numbers=True)
            given = ordinary(inputs)
            other = other_sizes(lambda trial: rehearsal.runs(*trial), given, thin_only, growth)
        return None if other is None else (capture(model, *other), other)
    except PathspaceError:
        # a model that cannot be captured again keeps its first capture
        return None


def sentence(inputs: Inputs, other: Inputs | None, undecided: bool) -> str:
    """The inputs for which a graph was derived, in words."""
    text = f"inputs ({describe_inputs(*inputs)})"
    if other is not None:
        return f"{text}, and other sizes as captured at ({describe_inputs(*other)})"
    if undecided:
        return f"{text} only, because it was not captured at other sizes"
    return f"{text}, and other sizes at which the model runs the same operations"
