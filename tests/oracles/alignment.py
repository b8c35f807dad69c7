"""What the library says of a graph, laid side by side with what an oracle enumerated."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.gsgd import PathProblem
from oracles.pathsets import Enumeration


def edge_slots(graph: Any) -> list[tuple[str, int]]:
    """(parameter name, flat index) of every edge of a reduction graph, in edge order."""
    slots = []
    for block in graph.blocks:
        unused = (
            np.zeros(block.shape, bool)
            if block.unused is None
            else block.unused.expand(block.shape).numpy()
        )
        slots += [(block.name, int(flat)) for flat in np.flatnonzero(~unused.reshape(-1))]
    return slots


def aligned(graph: Any, enumeration: Enumeration) -> np.ndarray:
    """The enumerated counting vectors with columns in the graph's edge order.

    Parameters that the graph reports as pinned are constants to it: they have no columns.

    Raises:
        ValueError: a weight lies on a path but is neither an edge of the
            graph nor reported as pinned.
    """
    column = {slot: i for i, slot in enumerate(enumeration.columns)}
    pinned = {name for pin in graph.pinned for name in pin.parameters}
    slots = edge_slots(graph)
    lost = {enumeration.columns[i] for i in np.flatnonzero(enumeration.used())} - set(slots)
    lost = {slot for slot in lost if slot[0] not in pinned}
    if lost:
        raise ValueError(f"weights on paths that are not edges: {sorted(lost)}")
    matrix = enumeration.matrix[:, [column[slot] for slot in slots]]
    return matrix[matrix.any(1)]


def edge_ends(graph: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tails and heads of all edges as integer combinations of the units' log-scales, `(m, H)` each.

    Id 0 is the root, 1..H are units, above them stand the combinations listed in `graph.forms`;
    -k is the opposite of k.
    """
    forms = np.asarray(graph.forms.toarray(), dtype=np.int64)
    table = np.concatenate(
        [np.zeros((1, graph.num_units), np.int64), np.eye(graph.num_units, dtype=np.int64), forms]
    )
    sides: list[list[np.ndarray]] = [[], []]
    for block in graph.blocks:
        keep = (
            slice(None)
            if block.unused is None
            else ~block.unused.expand(block.shape).reshape(-1).numpy()
        )
        for side, ids in zip(sides, (block.tail, block.head), strict=True):
            flat = ids.expand(block.shape).reshape(-1).numpy()[keep]
            side.append(table[np.abs(flat)] * np.sign(flat)[:, None])
    empty = np.zeros((0, graph.num_units), np.int64)
    tails, heads = (np.concatenate([empty, *side]) for side in sides)
    return tails, heads


def incidence(graph: Any) -> np.ndarray:
    """`(m, H)`: how log-scales of units move the logarithm of each weight: + at
    its head, - at its tail.
    """
    tails, heads = edge_ends(graph)
    return heads - tails


def path_problem(graph: Any, skeleton: Any) -> PathProblem:
    """The oracle's view of a reduction graph with a skeleton: rows of ends,
    and tree edges by number.
    """
    slots = edge_slots(graph)
    number = {slot: i for i, slot in enumerate(slots)}

    def tree(blocks: np.ndarray, indices: np.ndarray) -> list[int]:
        return [
            number[graph.blocks[b].name, int(i)]
            for b, i in zip(blocks[1:], indices[1:], strict=True)
        ]

    tree_in = tree(skeleton.tree_in.block, skeleton.tree_in.index)
    tree_out = tree(skeleton.tree_out.block, skeleton.tree_out.index)
    return PathProblem(*edge_ends(graph), slots, tree_in, tree_out)
