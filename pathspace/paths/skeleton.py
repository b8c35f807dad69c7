"""The skeleton: two spanning trees chosen by a rule, and their basis paths."""

from __future__ import annotations

import warnings
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import SEED, InputError, expect_arguments, expect_numbers
from ..gauge.balance import canonical_scales
from ..gauge.rescale import rescale_
from ..graph.growing import SpanningTreeBuilder
from ..graph.structure import Structure
from ..models.finite import expect_finite
from ..models.values import require_values, with_numbers
from ..shown import Shown, text_table
from .basis import BasisPaths, Path
from .mask_files import save_masks
from .two_trees import TwoTrees

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

M = TypeVar("M", bound=nn.Module)
RULES = ("modulo", "magnitude", "random")


class Skeleton(Shown, TwoTrees):
    """The two trees with their basis paths."""

    __doc__ = TwoTrees.__doc__

    def basis(self) -> BasisPaths:
        """The basis paths of the two trees."""
        return BasisPaths(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the masks as one safetensors file, see :func:`pathspace.save_masks`."""
        save_masks(self, path)

    def draw(
        self,
        file: str | PathLike[str] | None = None,
        level: str = "auto",
        path: int | Path | None = None,
    ) -> Figure:
        """Draw the reduction graph with the skeleton, see :func:`pathspace.draw`."""
        # (slow to import)
        from .draw import draw

        return draw(self, file, level, path)

    def __rich__(self) -> Table:
        rows = []
        for block in self.graph.blocks:
            enters, leaves = map(set, self.positions(block.name))
            counts = map(str, map(len, (enters, leaves, enters | leaves)))
            rows.append([block.name, "x".join(map(str, block.shape)) or "scalar", *counts])
        columns = ("parameter", "shape", "incoming", "outgoing", "skeleton")
        return text_table(f"Skeleton ({self.rule})", columns, rows, right=(1, 2, 3, 4))


def choose(graph: Structure, rule: str = "modulo", seed: int = 0) -> Skeleton:
    """Choose the skeleton by ``"modulo"`` (Algorithm 1 of the path-space paper: the j-th unit takes
    the ``j mod n``-th open edge), ``"magnitude"`` (the largest weight) or ``"random"``.

    Sizes are compared in a gauge that is the same for all rescaled copies of a network. Edges of
    weight 0 are taken last, edges of frozen weights first.
    """
    if rule not in RULES:
        raise InputError(
            f"skeleton found rule={rule!r}, expected one of {', '.join(map(repr, RULES))}."
        )
    expect_numbers("skeleton", SEED, seed=seed)
    if rule == "magnitude":
        weights = {block.name: graph.parameters[block.name] for block in graph.blocks}
        require_values("skeleton(rule='magnitude')", weights.items())
        for name, weight in weights.items():
            expect_finite("skeleton(rule='magnitude')", name, weight)
    with with_numbers():
        phi = canonical_scales(graph) if rule == "magnitude" else None
        tree_in = tree_out = SpanningTreeBuilder(graph, True, rule, seed, phi=phi).grow()
        # no edge leaves a product of scales alone: one tree is then used for both
        # directions, and there are no p_v
        if not graph.forms.shape[0]:
            tree_out = SpanningTreeBuilder(graph, False, rule, seed, phi=phi).grow()
    return Skeleton(graph, tree_in, tree_out, rule, seed)


def warn_of_dead(owner: str, skeleton: Skeleton) -> None:
    """Warn about units that are left out because only weights of 0 connect them."""
    dead = skeleton.dead
    if not len(dead):
        return
    touched = [
        block.name
        for block in skeleton.graph.blocks
        if any(np.isin(np.abs(ids.numpy()), dead).any() for ids in (block.head, block.tail))
    ]
    warnings.warn(
        f"{owner} leaves {len(dead)} of {skeleton.graph.num_units} units as they are, because only"
        " weights of 0 connect them to the rest: see skeleton.dead; they lie in"
        f" {', '.join(touched[:3])}{' and others' * (len(touched) > 3)}.",
        stacklevel=3,
    )


def canonicalise_(
    model: M, skeleton: Skeleton, tree: str = "out", optimizer: Optimizer | None = None
) -> M:
    """Rescale a model in place so that all weights of one tree are +-1; the
    function does not change.

    ``phi(v) = log |suf(v)|`` makes every suffix +-1, hence every weight of ``T_out`` (``phi(v) =
    -log |pre(v)|`` those of ``T_in``). There are as many units as edges in a tree, so this uses up
    the whole gauge: two models compute the same function by the same activations exactly if their
    canonical forms are equal. Dead units (``skeleton.dead``), which only weights of 0 connect to
    the rest, keep their scale.

    Args:
        model: the traced model, or a copy of it.
        skeleton: a skeleton of its reduction graph.
        tree: ``"out"`` (the constants of G-SGD) or ``"in"``.
        optimizer: see :func:`pathspace.rescale_`.

    Returns:
        The model.

    Raises:
        InputError: unknown ``tree``, or a skeleton weight is zero that was not when
            the skeleton was chosen.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(2, 3), ReLU(), Linear(3, 1))
        >>> canonical = ps.canonicalise_(model, ps.trace(model, torch.randn(1, 2)).skeleton())
        >>> bool(torch.allclose(canonical[2].weight.abs(), torch.ones(1, 3)))
        True
    """
    expect_arguments("canonicalise_", model=model, skeleton=skeleton)
    expect_arguments("canonicalise_", or_none=True, optimizer=optimizer)
    if tree not in ("in", "out"):
        raise InputError(f"canonicalise_ found tree={tree!r}, expected 'in' or 'out'.")
    warn_of_dead("canonicalise_", skeleton)
    skeleton = skeleton.live
    units = slice(1, skeleton.graph.num_units + 1)
    logs = skeleton.log_suffixes()[units] if tree == "out" else -skeleton.log_prefixes()[units]
    return rescale_(model, skeleton.graph, torch.from_numpy(logs), optimizer)
