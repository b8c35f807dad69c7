"""Whether the operations of a graph alone show that channels can change places.

In most networks for images every activation has its channels along dimension 1, and each operation
treats them alike, so that nothing need be measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from ..capture.captured import Captured, named_arguments
from ..inference.registry import RULES, facts_of, is_own, operation_name

# tensors of the model that an operation may read, by the name of the argument
HELD = {"weight": "parameter", "bias": "parameter"}
HELD |= {"running_mean": "buffer", "running_var": "buffer"}
# what has a batch along its first dimension
FLOWING = ("input", "operation")
POINTWISE = ("activation", "function", "sum", "product", "clip", "dropout")
POOLING = ("maximum pooling", "average pooling")
# (elements stay in their order)
RESHAPES = tuple(f"aten.{name}" for name in "flatten view reshape squeeze unsqueeze".split())


def treats_channels_alike(captured: Captured) -> bool:
    """Whether every operation does the same to each channel along dimension 1.

    Channels lie there in equal blocks, one after the other: layers write them so, grouped
    convolutions and flattened images join neighbours, and everything else keeps their places. What
    is not known to do so counts as different, and so does an input that no layer reads first.
    """
    kinds = {name: kind for name, (kind, _) in captured.sources.items()}
    for node in captured.graph.graph.nodes:
        computes = node.op == "call_function" and not all(
            map(_is_number, (node, *node.all_input_nodes))
        )
        if node.op == "get_attr" or (computes and not _treats_alike(node, kinds)):
            return False
    return True


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 1


def _treats_alike(node: fx.Node, kinds: Mapping[str, str]) -> bool:
    name, kind, value = operation_name(node.target), facts_of(node).kind, node.meta.get("val")
    given = named_arguments(node.target, node.args, dict(node.kwargs))
    read = [
        (key, kinds.get(each.name, "operation"), each.meta["val"])
        for key, each in given.items()
        if isinstance(each, fx.Node) and not _is_number(each)
    ]
    shapes = [operand.shape for _, source, operand in read if source in FLOWING]
    if (
        not shapes
        or min(map(len, shapes)) < 2
        or not isinstance(value, Tensor)
        or name not in RULES
        or not is_own(RULES[name])
        or any(source not in (*FLOWING, HELD.get(key)) for key, source, _ in read)
    ):
        return False
    old, new, rank, alone = shapes[0], value.shape, len(shapes[0]), len(shapes) == 1
    if name == "aten.linear":
        return alone and rank == 2
    known = all(source != "input" for _, source, _ in read)
    if kind == "convolution" or kind in POOLING:
        known = known or (kind == "convolution" and given["groups"] == 1)
        return known and alone and name.endswith(f"{rank - 2}d")
    if kind in POINTWISE and len(read) == len(shapes):
        return known and all(len(shape) == len(new) for shape in shapes)
    if name == "aten.mean":
        return known and all(dim % rank > 1 for dim in given.get("dim") or [0])
    # (one channel has no position of its own along which others could be met)
    flat = len(new) == 2 and new[0] == old[0] and old[1] > 1
    kept = name in RESHAPES and (tuple(new[:2]) == tuple(old[:2]) or flat)
    return known and alone and (kept or name == "aten.batch_norm")
