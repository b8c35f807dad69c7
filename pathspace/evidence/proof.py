"""The proof of Theorem 3 as a document, complete enough for an independent checker.

The document holds the reduction graph (the units at both ends of every scalar weight, in compact
form), the two trees with the order of their edges from the root, and the counts that follow.
:mod:`pathspace.checker`, which shares no code with this library, accepts or rejects it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import expect_arguments
from ..graph.spanning_tree import SpanningTree
from ..paths.skeleton import Skeleton
from ..rotations.space import FeatureSpaces, Space

FORMAT = "pathspace-proof"
VERSION = 3
# longer lists are written as runs, if that is shorter
SHORT = 256
STATEMENT = (
    "w_e <- w_e exp(phi(head e) - phi(tail e)), phi(root) = 0, acts by as many independent"
    " generators as there are units; the basis paths of the two trees are as many as weights less"
    " units, and independent"
)


def proof(
    skeleton: Skeleton, name: str = "", spaces: FeatureSpaces | None = None
) -> dict[str, Any]:
    """Write down why the path space of a graph has dimension ``m - H``.

    Args:
        skeleton: two spanning trees of a reduction graph.
        name: what to call the model.
        spaces: also write down these spaces of the same model, from :func:`pathspace.spaces`.

    Returns:
        The document, plain values only; ``json.dumps`` writes it.

    Raises:
        InputError: the spaces belong to another model.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> document = proof(ps.trace(model, torch.randn(1, 2)).skeleton())
        >>> document["weights"], document["units"], document["basis_paths"]
        (13, 3, 10)
        >>> from pathspace.checker import check
        >>> check(document).accepted
        True
    """
    expect_arguments("proof", skeleton=skeleton)
    expect_arguments("proof", or_none=True, spaces=spaces)
    graph = skeleton.graph
    if spaces is not None:
        spaces.expect_own("proof", graph.parameters)
    forms, listed = graph.forms.tocsr(), {*graph.index, *graph.unused}
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": name,
        "statement": STATEMENT,
        "weights": graph.num_weights,
        "units": graph.num_units,
        "dimension": graph.dimension,
        "tensors": [
            {
                "name": block.name,
                "shape": list(block.shape),
                "tail": _array(block.tail),
                "head": _array(block.head),
                "unused": None if block.unused is None else _array(block.unused),
                "edges": block.num_edges,
                **({"shift": block.shift} if block.shift else {}),
            }
            for block in graph.blocks
        ],
        "products": [
            [[int(unit) + 1, int(times)] for unit, times in zip(row.indices, row.data, strict=True)]
            for row in (forms[[i]] for i in range(forms.shape[0]))
        ],
        "statistics": [
            {
                "mean": statistic.mean,
                "var": statistic.var,
                "units": statistic.units.reshape(-1).tolist(),
                **({"eps": statistic.eps} if statistic.eps else {}),
            }
            for statistic in graph.statistics
        ],
        "pinned": [name for name in graph.parameters if name not in listed],
        "unused": list(graph.unused),
        "trees": {"in": _tree(skeleton.tree_in), "out": _tree(skeleton.tree_out)},
        "shared_edges": len(skeleton.shared),
        "chains": skeleton.num_chains,
        "basis_paths": len(skeleton.basis()),
        **({} if spaces is None else {"spaces": space_lines(spaces)}),
    }
    document["digest"] = document_digest(document)
    return document


def document_digest(document: dict[str, Any]) -> str:
    """SHA-256 of a document without its digest, which detects accidental changes."""
    body = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def space_lines(found: FeatureSpaces) -> dict[str, Any]:
    """All spaces as plain numbers, for certificates and proofs: ``dimension``, ``ties`` (names that
    need a tensor of their own), ``free`` (each with its group, and the positions along dimensions
    of parameters on which ``A`` or ``A^-T`` acts after gains moved there), ``rigid`` (and why).
    """
    return {
        "dimension": found.dimension,
        "ties": [name for name, first in found.ties.items() if first != name in found.sizes],
        "free": [_free(found, space) for space in found.free],
        "rigid": [{"name": space.name, "reason": space.reason} for space in found.rigid],
    }


def _free(found: FeatureSpaces, space: Space) -> dict[str, Any]:
    turn = {} if space.partners is None else {"partners": space.partners, "signs": space.signs}
    # (matrices in the order of their places, which is shorter to write)
    order = np.argsort(space.slices[0].positions[:, 0].numpy())
    return {
        "name": space.name,
        "group": space.group,
        "size": space.size,
        "count": space.count,
        "dimension": space.dimension,
        "gains": [{"parameter": name, "shift": found.shifts[name]} for name in space.gains],
        "slices": [
            {
                "parameter": part.parameter,
                "dim": part.dim,
                "dual": part.dual,
                "positions": _numbers(part.positions.numpy()[order].reshape(-1)),
                "gains": _moved_gains(found, space, part.coordinates[order].reshape(-1)),
            }
            for part in space.slices
        ],
        **{key: value.tolist() for key, value in turn.items() if value is not None},
    }


def _moved_gains(
    found: FeatureSpaces, space: Space, coordinates: np.ndarray
) -> list[dict[str, Any]]:
    """Which gains multiply the scalars of a slice: their positions, -1 for none, and the power."""
    powers = found.solution.powers_of_gains(coordinates)
    power = np.where(found.solution.dual[coordinates], 1, -1)[powers.row] * powers.data
    at, result = found.solution.gains[powers.col], []
    for name in space.gains:
        start, stop = found.offsets[name], found.offsets[name] + found.sizes[name]
        for value in np.unique(power[power != 0]).tolist():
            left = np.flatnonzero((at >= start) & (at < stop) & (power == value))
            # (a scalar may take several gains of one parameter)
            while len(left):
                rows, first = np.unique(powers.row[left], return_index=True)
                positions = np.full(len(coordinates), -1)
                positions[rows] = at[left[first]] - start
                line = {"parameter": name, "power": value, "positions": _numbers(positions)}
                result.append(line)
                left = np.delete(left, first)
    return result


def _array(ids: Tensor) -> dict[str, Any]:
    return {"shape": list(ids.shape), "values": _numbers(ids.reshape(-1).long().numpy())}


def _numbers(values: np.ndarray) -> list[int] | dict[str, list[list[int]]]:
    """Integers as a list, or as runs ``[first, step, count]``: ids mostly count up."""
    if len(values) <= SHORT:
        return list(values.tolist())
    step = np.diff(values)
    changes = np.flatnonzero(step[1:] != step[:-1]) + 1
    runs: list[list[int]] = []
    start = 0
    while start < len(values):
        if 12 * len(runs) > len(values):
            return list(values.tolist())
        place = int(np.searchsorted(changes, start, side="right"))
        last = int(changes[place]) if place < len(changes) else len(values) - 1
        by = int(step[start]) if start < len(step) else 0
        runs.append([int(values[start]), by, last - start + 1])
        start = last + 1
    return {"runs": runs}


def _tree(tree: SpanningTree) -> dict[str, Any]:
    order = np.concatenate([np.zeros(0, np.int64), *tree.rounds])
    parts = {"order": order, "tensor": tree.block[order], "index": tree.index[order]}
    return {key: _numbers(part) for key, part in parts.items()}
