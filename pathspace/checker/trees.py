"""The two bounds: trees that reach every unit, and as many basis paths as weights minus units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.sparse import coo_array, csr_array, triu
from scipy.sparse.csgraph import connected_components

from .document import Tensor, integers, is_bare, read_products, require


def count(document: Mapping[str, Any], blocks: list[Tensor], weights: int, units: int) -> None:
    """Check the two bounds."""
    require(units >= 0, "the number of units is negative")
    products = read_products(document)
    see_rest(document, blocks)
    sides = document["trees"]
    require(set(sides) == {"in", "out"}, "there are not two trees")
    entering, leaving = (
        _tree(sides[side], blocks, products, units, side) for side in ("in", "out")
    )
    shared = np.intersect1d(entering[0], leaving[0])
    same = not products or np.array_equal(entering[0], leaving[0])
    require(same, "with products of scales one tree has to serve both ways")
    chains = 0 if products else _chains(entering, shared)
    found = {
        "weights": weights,
        "dimension": weights - units,
        "shared_edges": len(shared),
        "chains": chains,
        "basis_paths": chains + weights - (2 * units - len(shared)),
    }
    for key, number in found.items():
        require(document[key] == number, f"the number of {key} is {number}, not as stated")
    enough = found["basis_paths"] == found["dimension"]
    require(enough, "basis paths are not as many as weights less units")


def see_rest(document: Mapping[str, Any], blocks: list[Tensor]) -> None:
    """Check the other lists: running statistics, each once, and parameters outside path space."""
    largest = document["units"] + len(document["products"])
    names = [block.name for block in blocks]
    for entry in document["statistics"]:
        fields = set(entry) - {"eps"} if isinstance(entry, dict) else set()
        require(fields == {"mean", "var", "units"}, "a statistic is malformed")
        eps = entry.get("eps", 0.0)
        positive = type(eps) in (int, float) and 0 <= eps < math.inf
        require(positive, "the eps of a statistic is no number")
        buffers = [entry[key] for key in ("mean", "var") if entry[key] is not None]
        named = buffers and all(isinstance(name, str) for name in buffers)
        require(named, "a statistic names no buffer")
        names += buffers
        ids = integers(entry["units"], "the units of a statistic")
        known = -largest <= ids.min(initial=0) and ids.max(initial=0) <= largest
        require(known, "a statistic names an unknown unit")
    for key in ("pinned", "unused"):
        listed = all(isinstance(name, str) for name in document[key])
        require(listed, f"{key!r} is not a list of names")
        names += document[key]
    require(len(set(names)) == len(names), "a tensor is listed twice")


def _tree(
    entry: Any, blocks: list[Tensor], products: list[dict[int, int]], units: int, side: str
) -> np.ndarray:
    """The number of the edge of every unit, and the ids at its ends, ``(3, units)``.

    In the order of the tree, the rows of its edges have to be triangular with ``+-1`` on the
    diagonal: each moves its own unit once, and else units before it.
    """
    unit = np.arange(1, units + 1)
    order, tensor, index = (
        integers(entry[key], f"tree {side}", units) for key in ("order", "tensor", "index")
    )
    once = len(tensor) == len(index) == units and np.array_equal(np.sort(order), unit)
    require(once, f"tree {side} does not reach every unit by one edge")
    ends = np.zeros((2, units), np.int64)
    for number in np.unique(tensor).tolist():
        require(0 <= number < len(blocks), f"tree {side} names unknown tensors")
        block, here = blocks[number], tensor == number
        flat = index[here]
        inside = flat.min() >= 0 and int(flat.max()) < math.prod(block.shape)
        require(inside, f"tree {side} leaves the tensor {block.name}")
        used = block.unused is None or not block.at(block.unused, flat).any()
        require(used, f"tree {side} uses an unused scalar of {block.name}")
        ends[:, here] = block.at(block.tail, flat), block.at(block.head, flat)
    # ids in rows, units in the order of the tree in columns; the root has no scale
    factors = [(units + k, *own) for k, row in enumerate(products, 1) for own in row.items()]
    by_unit = np.argsort(order)
    products_of = np.array(factors, np.int64).reshape(-1, 3).T
    ids, members, times = np.hstack([(unit, unit, np.ones_like(unit)), products_of])
    shape = units + len(products) + 1, units
    scales = csr_array((times, (ids, by_unit[members - 1])), shape=shape)
    tails, heads = (scales[np.abs(own)].multiply(np.sign(own)[:, None]) for own in ends)
    change = csr_array(heads - tails)
    wrong = order[np.abs(change.diagonal()) != 1]
    require(not len(wrong), f"tree {side} does not move the scales of units {wrong[:3]} once")
    late = order[np.diff(csr_array(triu(change, 1)).indptr) > 0]
    require(not len(late), f"tree {side} joins units {late[:3]} to units not reached before")
    fits = len(blocks) < 1 << 22 and int(index.max(initial=0)) < 1 << 40
    require(fits, "the tensors are too many or too large to be judged")
    return np.stack([tensor << 40 | index, *np.abs(ends)])[:, by_unit]


def _chains(tree: np.ndarray, shared: np.ndarray) -> int:
    """Count the chains: exactly one edge of ``T_in`` outside ``T_out`` has to enter each."""
    edge, tail, head = tree
    both, ids = np.isin(edge, shared), len(edge) + 1
    joined = coo_array((both[both], (tail[both], head[both])), shape=(ids, ids))
    number, chain = connected_components(joined, directed=False)
    require(number == ids - len(shared), "the edges in both trees close a circle")
    entered = np.sort(chain[1:][~both])
    others = np.delete(np.arange(number), chain[0])
    require(np.array_equal(entered, others), "a chain is not entered by exactly one edge")
    return len(others)


def compare_tensors(
    document: Mapping[str, Any], blocks: list[Tensor], tensors: Mapping[str, Any]
) -> None:
    """Check shapes of a model's tensors and, with values, that no tree weight is 0."""
    trees = document["trees"].values()
    tensor, index = (
        np.concatenate([integers(tree[key], "a tree", document["units"]) for tree in trees])
        for key in ("tensor", "index")
    )
    for number, block in enumerate(blocks):
        require(block.name in tensors, f"the model has no tensor {block.name}")
        value = tensors[block.name]
        require(tuple(value.shape) == block.shape, f"{block.name} has another shape in the model")
        if is_bare(value):
            continue
        flat = (value.detach() if hasattr(value, "detach") else np.asarray(value)).reshape(-1)
        places = index[tensor == number].tolist()
        alive = not places or bool((flat[places] + block.shift != 0).all())
        require(alive, f"a tree weight of {block.name} is zero")
