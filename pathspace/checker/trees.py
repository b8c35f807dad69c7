"""The two bounds: trees that reach every unit, and as many basis paths as weights minus units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .document import Tensor, integers, read_products, require


def count(document: Mapping[str, Any], blocks: list[Tensor], weights: int, units: int) -> None:
    """Check the two bounds."""
    require(
        units >= 0 and document["weights"] == weights, f"there are {weights} weights, not as stated"
    )
    require(
        document["dimension"] == weights - units,
        f"the dimension is {weights - units}, not as stated",
    )
    products = read_products(document)
    see_rest(document, blocks)
    require(set(document["trees"]) == {"in", "out"}, "there are not two trees")
    trees = [
        _tree(document["trees"][side], blocks, products, units, side) for side in ("in", "out")
    ]
    shared = np.intersect1d(trees[0].edge, trees[1].edge)
    require(
        document["shared_edges"] == len(shared),
        f"the trees share {len(shared)} edges, not as stated",
    )
    if products:
        same = np.array_equal(trees[0].edge, trees[1].edge)
        require(same, "with products of scales one tree has to serve both ways")
        chains = 0
    else:
        chains = _chains(trees[0], shared, units)
    require(document["chains"] == chains, f"there are {chains} chains, not as stated")
    count = chains + weights - (2 * units - len(shared))
    require(document["basis_paths"] == count, f"there are {count} basis paths, not as stated")
    require(count == weights - units, f"{count} basis paths are not as many as weights less units")


def see_rest(document: Mapping[str, Any], blocks: list[Tensor]) -> None:
    """Check the other lists: running statistics, each once, and parameters outside path space."""
    largest = document["units"] + len(document["products"])
    names = [block.name for block in blocks]
    for entry in document["statistics"]:
        fields = set(entry) - {"eps"} if isinstance(entry, dict) else set()
        require(fields == {"mean", "var", "units"}, "a statistic is malformed")
        eps = entry.get("eps", 0.0)
        require(
            type(eps) in (int, float) and 0 <= eps < math.inf, "the eps of a statistic is no number"
        )
        buffers = [entry[key] for key in ("mean", "var") if entry[key] is not None]
        require(
            buffers and all(isinstance(name, str) for name in buffers),
            "a statistic names no buffer",
        )
        names += buffers
        ids = integers(entry["units"], "the units of a statistic").tolist()
        require(
            all(-largest <= unit <= largest for unit in ids), "a statistic names an unknown unit"
        )
    for key in ("pinned", "unused"):
        require(
            all(isinstance(name, str) for name in document[key]), f"{key!r} is not a list of names"
        )
        names += document[key]
    require(len(set(names)) == len(names), "a tensor is listed twice")


@dataclass(frozen=True)
class Tree:
    """One edge for every unit, in their order: its number, and the ids at its ends."""

    edge: np.ndarray
    tail: np.ndarray
    head: np.ndarray


def _tree(
    entry: Any, blocks: list[Tensor], products: list[dict[int, int]], units: int, side: str
) -> Tree:
    """Check that every edge joins its unit, with coefficient +-1, to units before it."""
    order, tensor, index = (
        integers(entry[key], f"tree {side}", units) for key in ("order", "tensor", "index")
    )
    require(
        len(order) == len(tensor) == len(index) == units,
        f"tree {side} has not one edge for every unit",
    )
    require(
        np.array_equal(np.sort(order), np.arange(1, units + 1)),
        f"tree {side} does not reach every unit once",
    )
    require(
        units == 0 or (tensor.min() >= 0 and tensor.max() < len(blocks)),
        f"tree {side} names unknown tensors",
    )
    tails, heads = np.zeros(units, np.int64), np.zeros(units, np.int64)
    for number in np.unique(tensor):
        block, here = blocks[int(number)], np.flatnonzero(tensor == number)
        flat = index[here]
        inside = flat.min() >= 0 and int(flat.max()) < math.prod(block.shape)
        require(inside, f"tree {side} leaves the tensor {block.name}")
        if block.unused is not None:
            require(
                not block.at(block.unused, flat).any(),
                f"tree {side} uses an unused scalar of {block.name}",
            )
        tails[here], heads[here] = block.at(block.tail, flat), block.at(block.head, flat)
    # position of each unit in the order; the root comes first
    time_of = np.full(units + 1, -1)
    time_of[order] = np.arange(units)
    plain = (np.abs(tails) <= units) & (np.abs(heads) <= units)
    _plain_walk(order[plain], np.abs(tails[plain]), np.abs(heads[plain]), time_of, side)
    for place in np.flatnonzero(~plain).tolist():
        _walk_of_products(
            int(order[place]), int(tails[place]), int(heads[place]), products, time_of, side
        )
    fits = len(blocks) < 1 << 22 and int(index.max(initial=0)) < 1 << 40
    require(fits, "the tensors are too many or too large to be judged")
    by_unit = np.argsort(order)
    return Tree((tensor << 40 | index)[by_unit], np.abs(tails)[by_unit], np.abs(heads)[by_unit])


def _plain_walk(
    order: np.ndarray, tails: np.ndarray, heads: np.ndarray, time_of: np.ndarray, side: str
) -> None:
    """Check edges between units: one end is the unit itself, the other one was reached before."""
    once = (heads == order) != (tails == order)
    wrong = order[~once][:1].tolist()
    require(not wrong, f"an edge of tree {side} does not move the scale of unit {sum(wrong)} once")
    others = np.where(heads == order, tails, heads)
    late = order[time_of[others] >= time_of[order]][:1].tolist()
    require(not late, f"an edge of tree {side} joins unit {sum(late)} to a unit not reached before")


def _walk_of_products(
    unit: int, tail: int, head: int, products: list[dict[int, int]], time_of: np.ndarray, side: str
) -> None:
    """Check an edge with a product of units at an end: all units but one were reached before."""
    units = len(time_of) - 1
    row: dict[int, int] = {}
    for end, sign in ((head, 1), (tail, -1)):
        sign = -sign if end < 0 else sign
        factors = products[abs(end) - units - 1] if abs(end) > units else {abs(end): 1}
        for factor, times in factors.items():
            row[factor] = row.get(factor, 0) + sign * times
    require(
        abs(row.pop(unit, 0)) == 1,
        f"an edge of tree {side} does not move the scale of unit {unit} once",
    )
    row.pop(0, None)
    late = [other for other, times in row.items() if times and time_of[other] >= time_of[unit]]
    require(not late, f"an edge of tree {side} joins unit {unit} to a unit not reached before")


def _chains(tree: Tree, shared: np.ndarray, units: int) -> int:
    """Count the chains: exactly one edge of ``T_in`` outside ``T_out`` has to enter each."""
    leader = list(range(units + 1))

    def find(unit: int) -> int:
        while leader[unit] != unit:
            leader[unit] = leader[leader[unit]]
            unit = leader[unit]
        return unit

    both = np.isin(tree.edge, shared)
    for tail, head in zip(tree.tail[both].tolist(), tree.head[both].tolist(), strict=True):
        one, other = find(tail), find(head)
        require(one != other, "the edges in both trees close a circle")
        leader[max(one, other)] = min(one, other)
    entered = [find(unit) for unit in (np.flatnonzero(~both) + 1).tolist()]
    chains = {find(unit) for unit in range(1, units + 1)} - {find(0)}
    require(sorted(entered) == sorted(chains), "a chain is not entered by exactly one edge")
    return len(chains)
