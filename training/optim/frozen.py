"""Frozen weights, and the path values that are constant because of them.

The derivative with respect to the logarithm of ``p_k`` is a sum over the edges that a step on
``p_k`` changes: those of ``T_in`` alone that enter ``k``, and those outside ``T_out`` that leave
it. If one of them is frozen, its term is unknown, and the step would change it; so ``p_k`` is
constant, ``R_k = 1``, and frozen weights keep their exact values.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pathspace.paths.skeleton import Skeleton

from .layout import ids_at, tree_edges


def held_chains(skeleton: Skeleton, frozen: Iterable[int], count: int) -> np.ndarray:
    """Mask of the chains with constant path values.

    Args:
        skeleton: the skeleton.
        frozen: positions of the frozen blocks in the graph.
        count: number of chains, the root's included.

    Returns:
        A mask of shape ``(count,)``; the root's chain is never in it.
    """
    chain, edges, held = skeleton.chain, np.zeros(count, np.int64), np.zeros(count, bool)
    for number in frozen:
        block = skeleton.graph.blocks[number]
        inner, outer = tree_edges(skeleton, number)
        tails = chain[block.tail.abs().reshape(-1).numpy()]
        np.add.at(edges, tails, int(np.prod(block.shape, dtype=int)) // max(block.tail.numel(), 1))
        np.subtract.at(edges, chain[np.abs(ids_at(block.tail, outer, block.shape))], 1)
        held[chain[np.abs(ids_at(block.head, inner, block.shape))]] = True
    held |= edges > 0
    held[0] = False
    return held


__all__ = ["held_chains"]
