"""The two trees in a saved state: a skeleton chosen again from other weights takes them over."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from torch import Tensor

from pathspace.graph.spanning_tree import SpanningTree
from pathspace.paths.skeleton import Skeleton


def digest(text: str) -> Tensor:
    """A hash of a text as a tensor, as states hold it."""
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def choice(skeleton: Skeleton) -> Tensor:
    """A hash of the rule and the seed, which choose other trees for other weights."""
    return digest(f"{skeleton.rule} {skeleton.seed}")


def packed(skeleton: Skeleton) -> dict[str, Tensor]:
    """Both trees as tensors.

    Returns:
        ``choice``; ``trees``, shape ``(2, 8, H + 1)``: block, index, direction, parent, two signs,
        round and whether it is dead, of every unit; ``rest``, shape ``(4, entries)``: tree, row,
        column and exponent of other factors.
    """
    trees, rest = [], [np.zeros((4, 0), np.int64)]
    for number, tree in enumerate((skeleton.tree_in, skeleton.tree_out)):
        rounds = np.full(len(tree.block), -1)
        for turn, units in enumerate(tree.rounds):
            rounds[units] = turn
        arrays = (
            tree.block,
            tree.index,
            tree.forward,
            tree.parent,
            tree.own,
            tree.other,
            rounds,
            tree.dead,
        )
        trees.append(np.stack([array.astype(np.int64) for array in arrays]))
        entries = tree.rest.tocoo()
        rest.append(
            np.stack([np.full(entries.nnz, number), *entries.coords, entries.data]).astype(np.int64)
        )
    return {
        "choice": choice(skeleton),
        "trees": torch.from_numpy(np.stack(trees)),
        "rest": torch.from_numpy(np.concatenate(rest, 1)),
    }


def unpacked(skeleton: Skeleton, kept: Mapping[str, Any]) -> Skeleton | None:
    """A skeleton with the trees of a state, if the same rule and seed chose
    them for the same graph.

    Args:
        skeleton: another skeleton of the graph.
        kept: the entries of :func:`packed`, of a state that may be of any kind.
    """
    mark, trees, rest = (kept.get(name) for name in ("choice", "trees", "rest"))
    count = len(skeleton.tree_in.block)
    if not (isinstance(mark, Tensor) and isinstance(trees, Tensor) and isinstance(rest, Tensor)):
        return None
    if (
        not torch.equal(mark.cpu(), choice(skeleton))
        or trees.shape != (2, 8, count)
        or rest.shape[:-1] != (4,)
    ):
        return None
    found = [
        _tree(table, rest.cpu().numpy(), number) for number, table in enumerate(trees.cpu().numpy())
    ]
    one = skeleton.tree_out is skeleton.tree_in
    return replace(skeleton, tree_in=found[0], tree_out=found[0] if one else found[1])


def _tree(table: np.ndarray, rest: np.ndarray, number: int) -> SpanningTree:
    block, index, forward, parent, own, other, rounds, dead = table
    rows, columns, values = rest[1:, rest[0] == number]
    shape = (len(block), len(block))
    return SpanningTree(
        block=block,
        index=index,
        forward=forward.astype(bool),
        parent=parent,
        own=own,
        other=other,
        rounds=tuple(np.flatnonzero(rounds == turn) for turn in range(rounds.max(initial=-1) + 1)),
        rest=csr_array(coo_array((values, (rows, columns)), shape=shape)),
        dead=dead.astype(bool),
    )


__all__ = ["digest", "packed", "unpacked"]
