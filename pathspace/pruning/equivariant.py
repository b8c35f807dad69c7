"""Whether the operations of a graph alone show that channels can change places.

In most networks for images every activation has its channels along dimension 1, and each operation
treats them alike, so that nothing need be measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ..capture.captured import Captured
from ..inference.registry import RULES, facts_of, is_own, named_arguments, operation_name

# tensors of the model that an operation may read, by the name of the argument
HELD = {
    "weight": "parameter",
    "bias": "parameter",
    "running_mean": "buffer",
    "running_var": "buffer",
}
POINTWISE = ("activation", "function", "sum", "product", "clip", "dropout")
POOLING = ("maximum pooling", "average pooling")
# (elements stay in their order)
RESHAPES = tuple(f"aten.{name}" for name in "flatten view reshape squeeze unsqueeze".split())


def treats_channels_alike(captured: Captured) -> bool:
    """Whether every operation does the same to each channel along dimension 1.

    Channels lie there in equal blocks, one after the other: layers write them so, grouped
    convolutions and flattened images join neighbours, and everything else keeps their places. What
    is not known to do so counts as different.
    """
    # activation -> whether a layer made its channels; entries of an input are all different
    made: dict[fx.Node, bool] = {}
    kinds = {name: kind for name, (kind, _) in captured.sources.items()}
    for node in captured.graph.graph.nodes:
        if node.op == "get_attr":
            return False
        if kinds.get(node.name) == "input":
            made[node] = False
        elif node.op == "call_function" and not all(
            _is_number(part) for part in (node, *node.all_input_nodes)
        ):
            found = _made(node, made, kinds)
            if found is None:
                return False
            made[node] = found
    return True


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 1


def _made(node: fx.Node, made: Mapping[fx.Node, bool], kinds: Mapping[str, str]) -> bool | None:
    """Whether a layer made the channels of a result; ``None`` if the operation may treat them
    differently.
    """
    name, value = operation_name(node.target), node.meta.get("val")
    given = named_arguments(node.target, node.args, dict(node.kwargs))
    operands = [each for each in node.all_input_nodes if each in made]
    held = {
        key: kinds.get(each.name)
        for key, each in given.items()
        if isinstance(each, fx.Node) and each not in made and not _is_number(each)
    }
    shapes = [each.meta["val"].shape for each in operands]
    if (
        not operands
        or min(map(len, shapes)) < 2
        or not isinstance(value, Tensor)
        or name not in RULES
        or not is_own(RULES[name])
        or any(kind != HELD.get(key, "") for key, kind in held.items())
    ):
        return None
    if facts_of(node).kind in POINTWISE and not held:
        return _pointwise(value.dim(), shapes, [made[each] for each in operands])
    if len(operands) > 1:
        return None
    (old,), new, own = shapes, value.shape, made[operands[0]]
    layer, alike = _alike(name, facts_of(node).kind, given, old, new, own)
    return layer or own if alike else None


def _pointwise(rank: int, shapes: Sequence[Sequence[int]], made: Sequence[bool]) -> bool | None:
    # (the entries of inputs would give those of a layer an order)
    wide = {own for own, shape in zip(made, shapes, strict=True) if shape[1] > 1}
    mixed = len(wide) > 1 or (wide == {False} and any(made))
    return None if mixed or any(len(shape) != rank for shape in shapes) else any(made)


def _alike(
    name: str,
    kind: str,
    given: Mapping[str, Any],
    old: Sequence[int],
    new: Sequence[int],
    own: bool,
) -> tuple[bool, bool]:
    """Whether an operation of one activation makes new channels, and whether it treats the old ones
    alike.
    """
    rank = len(old)
    if kind == "convolution":
        return True, name.endswith(f"{rank - 2}d") and (given["groups"] == 1 or own)
    if name == "aten.linear":
        return True, rank == 2
    if name == "aten.batch_norm":
        return False, own
    if kind in POOLING:
        return False, name.endswith(f"{rank - 2}d")
    if name == "aten.mean":
        return False, all(dim % rank > 1 for dim in given.get("dim") or [0])
    # (one channel has no position of its own along which others could be met)
    flat = len(new) == 2 and new[0] == old[0] and (old[1] > 1 or not own)
    return False, name in RESHAPES and (tuple(new[:2]) == tuple(old[:2]) or flat)
