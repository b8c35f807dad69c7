"""Which parameter of an optimizer is which block of the reduction graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pathspace import InputError, ReductionGraph, UnsupportedError


def match(owner: str, groups: Sequence[dict[str, Any]], graph: ReductionGraph) -> list[int | None]:
    """The block of every parameter, in the order of the groups; ``None`` for those outside path space.

    Args:
        owner: who asks, for messages.
        groups: the groups of the optimizer; parameters without names are known by their identity.
        graph: the reduction graph of the skeleton.

    Returns:
        Positions in ``graph.blocks``.

    Raises:
        InputError: a block has no parameter, or one of another shape.
        UnsupportedError: complex parameters.
    """
    by_identity = {id(graph.parameters[block.name]): i for i, block in enumerate(graph.blocks)}
    result: list[int | None] = []
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for name, parameter in zip(names, group["params"], strict=True):
            block = graph.index.get(name) if name is not None else by_identity.get(id(parameter))
            result.append(block)
            if parameter.is_complex():
                raise UnsupportedError(
                    f"{owner} found parameter {name!r} with complex numbers, expected real ones: path values are real."
                )
            if block is not None and tuple(parameter.shape) != graph.blocks[block].shape:
                raise InputError(
                    f"{owner} found parameter {name!r} of shape {tuple(parameter.shape)}, expected "
                    f"{graph.blocks[block].shape} as traced; trace the model that is being trained."
                )
    missing = [block.name for i, block in enumerate(graph.blocks) if i not in set(result)]
    if missing:
        raise InputError(
            f"{owner} found no parameter for {len(missing)} blocks of the skeleton (first: {missing[0]!r}); pass "
            "model.named_parameters() of the traced model or of a copy with the same names."
        )
    return result


__all__ = ["match"]
