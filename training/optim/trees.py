"""TreeProducts of weights along the two trees of a skeleton, in a few operations of any depth."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from torch import Tensor

from pathspace.errors import UnsupportedError
from pathspace.graph.spanning_tree import SpanningTree
from pathspace.paths.skeleton import Skeleton

from .layout import Layout
from .sharding import Spread, local


@dataclass(frozen=True, eq=False)
class TreeProducts:
    """The products along both trees.

    Attributes:
        tree: the weights on the trees of all devices, float64.
        here: those on this device.
        table: the products along ``T_in`` by id, along ``T_out`` by id, then all their reciprocals.
    """

    tree: Tensor
    here: Tensor
    table: Tensor

    @classmethod
    def of(cls, owner: str, layout: Layout, skeleton: Skeleton, spread: Spread) -> TreeProducts:
        """The products of the current weights.

        The products of a path of any length take one multiplication per doubling: of every
        unit's product by that of the unit where it ends so far.

        Args:
            owner: the optimizer's class, for messages.
            layout: the index vectors.
            skeleton: the skeleton.
            spread: how the tensors are sharded.
        """
        here = read(layout)
        tree = here
        if layout.shared is not None:
            places, counts = layout.shared
            tree = spread.sum(here.new_zeros(layout.total).index_copy_(0, places, here * counts))
            here = tree.index_select(0, places)
        # (numbers of a processor can be looked at without waiting)
        if tree.device.type == "cpu" and not tree.numpy().all():
            cls(tree, here, tree).expect_numbers(owner, layout, skeleton)
        ends = torch.cat([tree, tree.new_ones(1)])
        if layout.jumps is None:
            weights = ends.index_select(0, layout.edges).view(2, -1).cpu()
            table = torch.cat([skeleton.prefixes(weights[0]), skeleton.suffixes(weights[1])])
            table = table.to(tree.device)
        else:
            table = torch.cat([ends, ends.reciprocal()]).index_select(0, layout.edges)
            for jump in layout.jumps:
                table = table * table.index_select(0, jump)
        if not layout.both:
            table = torch.cat([table, table.reciprocal()])
        return cls(tree, here, table)

    def chains(self, layout: Layout) -> Tensor:
        """The path values of all chains; 1 for the root."""
        count = len(self.table) // 4
        values = self.table.index_select(0, layout.first)
        values = values * self.table.index_select(0, layout.first + count)
        values[0] = 1
        return values

    def expect_numbers(self, owner: str, layout: Layout, skeleton: Skeleton) -> None:
        """Refuse weights on the trees that are 0, NaN or infinite.

        Raises:
            UnsupportedError: there is one.
        """
        bad = (self.tree == 0) | ~self.tree.isfinite()
        if not bool(bad.any()):
            return
        place = int(bad.nonzero()[0])
        found, name = float(self.tree[place]), ""
        for block, span in layout.spans.items():
            if place in span:
                name = skeleton.graph.blocks[block].name
        raise UnsupportedError(
            f"{owner} found a skeleton weight of {found:g} in {name!r}, expected "
            + (
                "non-zero ones; choose the skeleton again from the model as it stands, or"
                " init_skeleton(model, skeleton) first."
                if found == 0
                else "finite ones; load weights from before they diverged."
            )
        )


def read(layout: Layout) -> Tensor:
    """The weights on the trees on this device, in float64."""
    some = []
    for entry in layout.entries:
        if entry.count:
            some.append(local(entry.parameter).take(entry.where))
    return torch.cat(some).double() if some else torch.zeros(0, dtype=torch.float64)


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


__all__ = ["TreeProducts", "digest", "packed", "unpacked"]
