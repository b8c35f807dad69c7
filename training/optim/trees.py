"""Products of weights along the two trees of a skeleton, and trees in the state of an optimizer."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathspace.errors import InputError, UnsupportedError
from pathspace.graph.growing import tree_of_edges
from pathspace.paths.skeleton import Skeleton

from .layout import Layout
from .tensors import Spread, known, local


@dataclass(frozen=True, eq=False)
class TreeProducts:
    """The products along both trees.

    Attributes:
        here: the weights on the trees on this device, float64.
        table: the products along ``T_in`` by id, along ``T_out`` by id, and their reciprocals.
        squares: their squares.
        least: the smallest of these (NaN: not known).
        chains: the path values of all chains; 1 for the root.
    """

    here: Tensor
    table: Tensor
    squares: Tensor
    least: float
    chains: Tensor

    @classmethod
    def of(cls, owner: str, layout: Layout, spread: Spread) -> TreeProducts:
        """The products of the current weights.

        The products of a path of any length take one multiplication per doubling: of every
        unit's product by that of the unit where it ends so far.
        """
        some = [local(e.parameter).take(e.where) for e in layout.entries if e.count]
        here = tree = layout.tree
        if layout.shared is not None:
            places, counts = layout.shared
            tree.zero_()
            if some:
                tree.index_copy_(0, places, torch.cat(some).double() * counts)
            here = spread.sum(tree).index_select(0, places)
        elif some:
            tree.copy_(torch.cat(some))
        torch.reciprocal(layout.ends, out=layout.inverse)
        table = layout.both.index_select(0, layout.edges)
        if layout.jumps is None:
            weights, skeleton = table.view(2, -1).cpu(), layout.skeleton
            table = torch.cat([skeleton.prefixes(weights[0]), skeleton.suffixes(weights[1])])
            table = torch.cat([table, table.reciprocal()]).to(tree.device)
        else:
            for jump in layout.jumps:
                table = table * table.index_select(0, jump)
        squares = table * table
        least = known(squares.min())
        if tree.device.type == "cpu" and not least > 0 and not tree.all():
            expect_tree_weights(owner, layout)
        pre, suffix = table.index_select(0, layout.representatives).chunk(2)
        return cls(here, table, squares, least, pre * suffix)


def expect_tree_weights(owner: str, layout: Layout) -> None:
    """Refuse weights on the trees that are 0, NaN or infinite.

    Raises:
        UnsupportedError: there is one.
    """
    tree = layout.tree
    bad = (tree == 0) | ~tree.isfinite()
    if not bool(bad.any()):
        return
    place = int(bad.nonzero()[0])
    found, name = float(tree[place]), ""
    for block, (flat, start) in layout.spans.items():
        if start <= place < start + len(flat):
            name = layout.skeleton.graph.blocks[block].name
    raise UnsupportedError(
        f"{owner} found a skeleton weight of {found:g} in {name!r}, expected "
        + (
            "non-zero ones; choose the skeleton again from the model as it stands, or"
            " init_skeleton_(model, skeleton) first."
            if found == 0
            else "finite ones; load weights from before they diverged."
        )
    )


def digest(text: str) -> Tensor:
    """A hash of a text as a tensor, as states hold it."""
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def choice(skeleton: Skeleton) -> Tensor:
    """A hash of the rule and the seed, which choose other trees for other weights."""
    return digest(f"{skeleton.rule} {skeleton.seed}")


def edges_of(skeleton: Skeleton) -> Tensor:
    """Block and flat position of every unit's edge in both trees, ``(2, 2, H + 1)``."""
    trees = (skeleton.tree_in, skeleton.tree_out)
    return torch.from_numpy(np.stack([np.stack([tree.block, tree.index]) for tree in trees]))


def kept_of(
    owner: str,
    found: Mapping[str, Any],
    wanted: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    device: torch.device,
) -> dict[str, Any]:
    """A copy of what a state holds of path space, besides the trees; vectors have the shapes
    ``wanted``, and those of chains the ``sizes`` of their groups.

    Raises:
        InputError: a vector is missing, or of another shape.
    """
    kept: dict[str, Any] = {name: found.get(name) for name in wanted}
    # (numbers of steps stay where the optimizer has put them)
    kept["chains"] = {
        key: copy.deepcopy(dict(entry)) for key, entry in found.get("chains", {}).items()
    }
    places = [(kept, name, shape) for name, shape in wanted.items()] + [
        (entry, name, (sizes.get(key, 0),))
        for key, entry in kept["chains"].items()
        for name, value in entry.items()
        if isinstance(value, Tensor) and value.ndim
    ]
    for holder, name, shape in places:
        value = holder[name]
        if not isinstance(value, Tensor) or value.shape != torch.Size(shape):
            raise InputError(
                f"{owner} found a damaged state: {name!r} of path space is not a tensor of shape"
                f" {shape}, expected what optimizer.state_dict() returned; load another checkpoint."
            )
        holder[name] = value.detach().to(device, copy=True)
    return kept


def skeleton_of(skeleton: Skeleton, kept: Mapping[str, Any]) -> Skeleton | None:
    """A skeleton with the trees of a state, if they are others that the same rule and seed
    chose for the same graph.
    """
    mark, edges, own = kept.get("choice"), kept.get("trees"), edges_of(skeleton)
    if not isinstance(mark, Tensor) or not torch.equal(mark.cpu(), choice(skeleton)):
        return None
    if not isinstance(edges, Tensor) or edges.shape != own.shape or torch.equal(edges.cpu(), own):
        return None
    graph, trees = skeleton.graph, []
    for entering, (block, index) in zip((True, False), edges.cpu().numpy(), strict=True):
        of_block = {number: index[block == number] for number in range(len(graph.blocks))}
        dead = (block < 0) & (np.arange(len(block)) > 0)
        trees.append(tree_of_edges(graph, entering, of_block, dead))
    one = skeleton.tree_out is skeleton.tree_in
    return replace(skeleton, tree_in=trees[0], tree_out=trees[0] if one else trees[1])
