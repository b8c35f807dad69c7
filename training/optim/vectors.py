"""Parts of the few long vectors that a step works on: what it multiplies by, and what every tensor needs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.optim.layout import Layout


@dataclass(frozen=True)
class Parts:
    """Views of the vectors that an optimizer keeps.

    Attributes:
        both: ratios of all chains and their reciprocals, shape ``(2, chains)``.
        ratio: the first row: what chains are multiplied by.
        inverse: the second: what they are divided by (their gradient's place before that).
        tree: the weights on the trees.
        least: smallest ratios allowed: by those, path values come as close to 0 as they may.
        rounded: by type: by tail the step, by tail ``1 / R``, and the weights on the trees.
        columns: of every tensor, ``1 / R`` and the step by tail, in its shape and type.
        on_tree: of every tensor, its weights on the trees, in its type.
    """

    both: Tensor
    ratio: Tensor
    inverse: Tensor
    tree: Tensor
    least: Tensor
    rounded: Mapping[torch.dtype, tuple[Tensor, ...]]
    columns: Sequence[tuple[Tensor, Tensor] | None]
    on_tree: Sequence[Tensor | None]


def cut(
    layout: Layout,
    dtypes: Sequence[torch.dtype],
    factors: Tensor,
    coefficient: Tensor,
    limits: Tensor,
    whole: Mapping[torch.dtype, Tensor],
) -> Parts:
    """Cut the vectors into parts.

    Args:
        layout: what a step needs from every tensor.
        dtypes: types of the tensors.
        factors: ratios of all chains, then their reciprocals.
        limits: 0, and the smallest ratios allowed.
        coefficient: by tail -1, then the weights on the trees.
        whole: by type, what tensors need of a step: by tail the step, by tail ``1 / R``, then the weights on the trees.
    """
    tails, trees = layout.tails, sum(layout.trees)
    both = factors.view(2, -1)
    rounded = {dtype: tuple(vector.split([tails, tails, trees])) for dtype, vector in whole.items()}
    columns: list[tuple[Tensor, Tensor] | None] = []
    on_tree: list[Tensor | None] = []
    position = 0
    for part, dtype, span, count in zip(layout.parts, dtypes, layout.spans, layout.trees, strict=True):
        own = rounded.get(dtype)
        on_tree.append(own[2][position : position + count] if own is not None and count else None)
        position += count
        if span is None or own is None:
            columns.append(None)
        else:
            step, keep = (vector[span[0] : span[1]].view(part.tail.shape) for vector in own[:2])
            columns.append((keep, step))
    return Parts(both, both[0], both[1], coefficient[tails:], limits[1], rounded, columns, on_tree)


__all__ = ["Parts", "cut"]
