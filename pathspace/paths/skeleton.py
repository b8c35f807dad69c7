"""The skeleton: two spanning trees chosen by a rule, and their basis paths."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SEED, InputError, expect_numbers
from ..gauge.balance import canonical_scales
from ..graph.growing import SpanningTreeBuilder
from ..graph.structure import Structure
from ..models.finite import expect_finite
from ..models.values import require_values, with_numbers
from ..shown import Shown
from .basis import BasisPaths
from .two_trees import TwoTrees

if TYPE_CHECKING:
    from rich.table import Table

RULES = ("modulo", "magnitude", "random")


class Skeleton(Shown, TwoTrees):
    """The two trees with their basis paths."""

    __doc__ = TwoTrees.__doc__

    def basis(self) -> BasisPaths:
        """The basis paths of the two trees."""
        return BasisPaths(self)

    def __rich__(self) -> Table:
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=box.SIMPLE, title=f"Skeleton ({self.rule})", title_justify="left")
        table.add_column("parameter")
        for heading in ("shape", "incoming", "outgoing", "skeleton"):
            table.add_column(heading, justify="right")
        for block in self.graph.blocks:
            enters, leaves = map(set, self.positions(block.name))
            counts = map(str, map(len, (enters, leaves, enters | leaves)))
            table.add_row(escape(block.name), "x".join(map(str, block.shape)) or "scalar", *counts)
        return table


def choose(graph: Structure, rule: str = "modulo", seed: int = 0) -> Skeleton:
    """Choose the skeleton of a reduction graph.

    Args:
        graph: the reduction graph.
        rule: ``"modulo"`` (Algorithm 1 of the path-space paper, extended to any graph: the j-th
            unit takes the ``j mod n``-th open edge), ``"magnitude"`` (the largest weight: the best
            conditioned choice) or ``"random"``. Sizes are compared in a gauge that is the same for
            all rescaled copies of a network, so that they have the same trees. Edges of weight 0
            are taken last, edges of frozen weights first.
        seed: seed of the random rule.

    Returns:
        The skeleton.

    Raises:
        InputError: unknown rule, or ``"magnitude"`` of weights without values or with NaN.
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
        tree_in = SpanningTreeBuilder(graph, True, rule, seed, phi=phi).grow()
        # no edge leaves a product of scales alone: one tree is then used for both
        # directions, and there are no p_v
        tree_out = (
            tree_in
            if graph.forms.shape[0]
            else SpanningTreeBuilder(graph, False, rule, seed, phi=phi).grow()
        )
    return Skeleton(graph, tree_in, tree_out, rule, seed)


def warn_of_dead(owner: str, skeleton: Skeleton) -> None:
    """Warn about units that are left out because only weights of 0 connect them.

    Args:
        owner: name of the function or class that leaves them out.
        skeleton: the skeleton.
    """
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
