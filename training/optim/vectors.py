"""Parts of the few long vectors that a step works on: what it multiplies by, and what every tensor needs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.training.optim.layout import Layout


@dataclass(frozen=True)
class Parts:
    """Views of the vectors that an optimizer keeps.

    Attributes:
        both: ratios of all chains and their reciprocals, shape ``(2, chains)``.
        ratio: the first row: what chains are multiplied by.
        inverse: the second: what they are divided by.
        zero: 0 for all chains.
        least: smallest ratios allowed: by those, path values come as close to 0 as they may.
        coefficient: by tail -1, then the weights on the trees: by these, entries are multiplied where chains sum them.
        tree: the weights on the trees.
        sources: where the factors of tails, of tree edges by their heads and of tree edges by their tails are in
            ``both`` (empty: all of them are 1).
        rounded: by type: by tail the step and ``1 / R``, then the weights on the trees.
        columns: of every tensor, ``1 / R`` and the step by tail, in its shape and type.
        on_tree: of every tensor, its weights on the trees, in its type.
    """

    both: Tensor
    ratio: Tensor
    inverse: Tensor
    zero: Tensor
    least: Tensor
    coefficient: Tensor
    tree: Tensor
    sources: tuple[Tensor, ...]
    rounded: Sequence[tuple[Tensor, Tensor]]
    columns: Sequence[tuple[Tensor, Tensor] | None]
    on_tree: Sequence[Tensor | None]


def cut(
    layout: Layout,
    dtypes: Sequence[torch.dtype],
    factors: Tensor,
    limits: Tensor,
    coefficient: Tensor,
    rounded: Mapping[torch.dtype, Tensor],
) -> Parts:
    """Cut the vectors into parts.

    Args:
        layout: what a step needs from every tensor.
        dtypes: types of the tensors.
        factors: ratios of all chains, then their reciprocals.
        limits: 0, and the smallest ratios allowed.
        coefficient: by tail -1, then the weights on the trees.
        rounded: by type of tensor, by tail the step, by tail ``1 / R``, then the weights on the trees.
    """
    tails, trees = layout.tails, sum(layout.trees)
    both = factors.view(2, -1)
    sources = layout.source.split([tails, trees, len(layout.source) - tails - trees])
    columns: list[tuple[Tensor, Tensor] | None] = []
    on_tree: list[Tensor | None] = []
    position = 0
    own = {dtype: vector.split([tails, tails, trees]) for dtype, vector in rounded.items()}
    for part, dtype, span, count in zip(layout.parts, dtypes, layout.spans, layout.trees, strict=True):
        mine = own.get(dtype)
        on_tree.append(mine[2][position : position + count] if mine is not None and count else None)
        position += count
        if span is None or mine is None:
            columns.append(None)
        else:
            by_tail = [vector[span[0] : span[1]].view(part.tail.shape) for vector in mine[:2]]
            columns.append((by_tail[1], by_tail[0]))
    rows = (both[0], both[1], limits[0], limits[1])
    pairs = [(vector[: 2 * tails], vector[2 * tails :]) for vector in rounded.values()]
    return Parts(both, *rows, coefficient, coefficient[tails:], sources, pairs, columns, on_tree)


__all__ = ["Parts", "cut"]
