"""Which parameter of an optimizer is which block of the reduction graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pathspace import InputError, UnsupportedError
from pathspace.structure import Structure


def named(groups: Sequence[dict[str, Any]]) -> list[tuple[str | None, Tensor]]:
    """All parameters of some groups with their names, ``None`` where they came without."""
    result: list[tuple[str | None, Tensor]] = []
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        result += zip(names, group["params"], strict=True)
    return result


def refuse_complex(owner: str, parameters: Sequence[tuple[str | None, Tensor]]) -> None:
    """Refuse complex parameters.

    Raises:
        UnsupportedError: naming the first of them.
    """
    for name, parameter in parameters:
        if parameter.is_complex():
            raise UnsupportedError(
                f"{owner} found parameter {name!r} with complex numbers, expected real ones: path values are real."
            )


def refuse_shifts(owner: str, graph: Structure) -> None:
    """Refuse graphs in which the sum of a parameter and a constant scales.

    Raises:
        UnsupportedError: naming the first such parameter.
    """
    block = next((block for block in graph.blocks if block.shift), None)
    if block is not None:
        raise UnsupportedError(
            f"{owner} found parameter {block.name!r}, to which the model adds {block.shift:g}, expected weights that "
            "scale themselves; take the skeleton of ps.trace(model, ..., affine=False), which keeps such parameters "
            "out of the gauge."
        )


def match(owner: str, parameters: Sequence[tuple[str | None, Tensor]], graph: Structure) -> list[int | None]:
    """The block of every parameter; ``None`` for those outside path space.

    The traced model's own parameters are known by identity. What is left over is matched by name: copies of the model,
    and parameters that were replaced since.

    Args:
        owner: who asks, for messages.
        parameters: names, if there are any, and parameters.
        graph: the reduction graph of the skeleton.

    Returns:
        Positions in ``graph.blocks``.

    Raises:
        InputError: a block has no parameter, two of them, or one of another shape.
        UnsupportedError: complex parameters, or parameters that a constant is added to.
    """
    refuse_complex(owner, parameters)
    refuse_shifts(owner, graph)
    own = {id(graph.parameters[b.name]): i for i, b in enumerate(graph.blocks) if b.name in graph.parameters}
    result = [own.get(id(parameter)) for _, parameter in parameters]
    taken = {block for block in result if block is not None}
    seen: set[int] = set()
    for i, (name, parameter) in enumerate(parameters):
        block = result[i]
        if block is None and name is not None:
            block = graph.index.get(name)
            block = None if block in taken else block
        if block is None:
            continue
        if tuple(parameter.shape) != graph.blocks[block].shape:
            raise InputError(
                f"{owner} found parameter {name!r} of shape {tuple(parameter.shape)}, expected "
                f"{graph.blocks[block].shape} as traced; trace the model that is being trained."
            )
        if block in seen:
            raise InputError(
                f"{owner} found two parameters for {graph.blocks[block].name!r} of the skeleton, expected one; pass "
                "each parameter once, and name those of other modules differently."
            )
        seen.add(block)
        result[i] = block
    missing = [block.name for i, block in enumerate(graph.blocks) if i not in seen]
    if missing:
        raise InputError(
            f"{owner} found no parameter for {len(missing)} blocks of the skeleton (first: {missing[0]!r}); pass "
            "model.named_parameters() of the traced model or of a copy with the same names."
        )
    return result


__all__ = ["match", "named", "refuse_complex", "refuse_shifts"]
