"""Operations that contain graphs: regions without gradients, branches, loops, attention scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .rules.attention import attention
from .rules.edges import with_others
from .values import Weight, unknown

REGIONS: dict[str, Callable[..., Any]] = {}
Graph = fx.GraphModule


def region(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the interpretation of an operation that contains graphs:
    ``function(interpreter, *args, **kwargs)``.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        REGIONS.update(dict.fromkeys(names, function))
        return function

    return register


@region("wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "wrap",
        "invoke_subgraph",
        "wrap_activation_checkpoint", "strict_mode", "run_const_graph", "inductor_compiled_code",
        "dynamo_bypassing_wrapper")  # fmt: skip
def once(interpreter: Any, *args: Any, **kwargs: Any) -> Any:
    """A region that is run once."""
    place = next(i for i, arg in enumerate(args) if isinstance(arg, Graph))
    operands = [arg for arg in args[place + 1 :] if not isinstance(arg, str)]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    return interpreter.region(args[place], operands)


def _joined(interpreter: Any, *results: Any) -> Any:
    """A result that is one of several, which therefore share scales."""
    flat, spec = zip(*(pytree.tree_flatten(result) for result in results), strict=True)

    def join(*leaves: Any) -> Any:
        for leaf in leaves:
            if getattr(leaf, "buffer_name", None) is not None:
                interpreter.semantics.read(leaf.buffer_name)
        return (
            interpreter.semantics.join(*leaves)
            if isinstance(leaves[0], Tensor | Weight)
            else leaves[0]
        )

    return pytree.tree_unflatten([join(*leaves) for leaves in zip(*flat, strict=True)], spec[0])


@region("cond")
def branches(
    interpreter: Any, condition: Any, first: Graph, second: Graph, operands: Sequence[Any] = ()
) -> Any:
    """One of two graphs, chosen by data."""
    if isinstance(condition, Tensor | Weight):
        interpreter.semantics.pin(
            [interpreter.semantics.activation(condition)], "a condition compares values"
        )
    return _joined(
        interpreter, *(interpreter.region(graph, list(operands)) for graph in (first, second))
    )


@region("while_loop")
def while_loop(
    interpreter: Any,
    condition: Graph,
    body: Graph,
    carried: Sequence[Any],
    more: Sequence[Any] = (),
) -> Any:
    """A loop of unknown length: the carried values have the same scales in every step."""
    # (numbers that are known at the start change)
    state = [
        unknown(interpreter.semantics.activation(value))
        if isinstance(value, Tensor | Weight)
        else value
        for value in carried
    ]
    for turn in itertools.count():
        holds = interpreter.region(condition, [*state, *more])
        interpreter.semantics.pin(
            [leaf for leaf in pytree.tree_leaves(holds) if isinstance(leaf, Tensor)],
            "a condition compares values",
        )
        before = state
        state = list(_joined(interpreter, state, list(interpreter.region(body, [*state, *more]))))
        # (exact zeros may become something else one after the other)
        if turn > 1 and interpreter.semantics.is_settled(before, state):
            break
    return tuple(state)


@region("scan")
def scan(interpreter: Any, body: Graph, state: Sequence[Any], sequences: Sequence[Any],
         more: Sequence[Any] = (), **kwargs: Any) -> Any:  # fmt: skip
    """A loop over the first dimension that passes on a state and stacks
    the outputs of its steps.
    """
    semantics = interpreter.semantics
    length = sequences[0].shape[0]
    looked_at = semantics.steps(length)
    carried: list[Any] = [semantics.activation(value) for value in state]
    emitted: list[list[Tensor]] = []
    for step in range(looked_at):
        parts = [semantics.step(semantics.activation(value), 0, step) for value in sequences]
        repeats = semantics.stands_for_more(step, length)
        if repeats:
            # (what is known in this step is not in later ones)
            carried = [unknown(value) for value in carried]
        while True:
            results = list(interpreter.region(body, [*carried, *parts, *more]))
            before = carried
            carried = [semantics.activation(value) for value in results[: len(before)]]
            if repeats:
                pairs = zip(before, carried, strict=True)
                carried = [unknown(semantics.join(*pair)) for pair in pairs]
            if not repeats or semantics.is_settled(before, carried):
                break
        emitted.append([semantics.activation(value) for value in results[len(carried) :]])
    columns = [
        torch.stack([*column, *[column[-1]] * (length - looked_at)])
        for column in zip(*emitted, strict=True)
    ]
    return (*carried, *columns)


@region("flex_attention")
def flex_attention(interpreter: Any, query: Any, key: Any, value: Any, score: Any, mask: Any,
                   scale: Any, options: Any,
                   score_buffers: Sequence[Any] = (),
                   mask_buffers: Sequence[Any] = ()) -> Any:  # fmt: skip
    """Attention with a user's function of the scores; further tensors that it reads are pinned."""
    semantics = interpreter.semantics
    extra = [
        leaf
        for leaf in pytree.tree_leaves((score_buffers, mask_buffers))
        if isinstance(leaf, Tensor | Weight)
    ]
    semantics.pin([semantics.activation(leaf) for leaf in extra], "attention scores")
    shown = semantics.place.result
    semantics.place.result = shown[0] if isinstance(shown, list | tuple) else shown
    out = attention(semantics, query, key, value, enable_gqa=query.shape[-3] != key.shape[-3])
    semantics.place.result = shown
    return with_others(semantics, out)
