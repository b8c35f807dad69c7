"""The gauge transformations of trained weights that do not change frozen weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from pathspace.graph.structure import Structure


def movable(graph: Structure, names: Collection[str]) -> tuple[Structure, csr_array]:
    """Merge units connected by a frozen weight, which is constant only if both
    ends have the same scale.

    Units that frozen weights connect to the root are fixed, and so are all factors of a
    product at a frozen weight.

    Args:
        graph: the reduction graph.
        names: the tensors that may change.

    Returns:
        The graph of these tensors over merged units; and the integer matrix ``(H, merged)`` from
        log-scales of merged units to those of units.

    Example:
        >>> import torch, pathspace as ps
        >>> layers = torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        >>> graph = ps.trace(torch.nn.Sequential(*layers), torch.randn(1, 2))
        >>> (
        ...     movable(graph, ["0.weight", "0.bias", "2.weight"])[0].num_units,
        ...     movable(graph, ["0.weight"])[0].num_units,
        ... )
        (3, 0)
    """
    count = graph.num_units + 1
    frozen = [block for block in graph.blocks if block.name not in names]
    starts, ends = [np.zeros(1, np.int64)], [np.full(1, count)]

    def node(ids: np.ndarray) -> np.ndarray:
        plain = np.where(np.abs(ids) < count, ids, 0)
        return np.where(plain < 0, count - plain, plain)

    for block in frozen:
        tail, head = (ids.numpy() for ids in torch.broadcast_tensors(block.tail, block.head))
        pairs = np.unique(np.stack([tail.reshape(-1), head.reshape(-1)]), axis=1)
        for sign in (1, -1):
            starts.append(node(sign * pairs[0]))
            ends.append(node(sign * pairs[1]))
        derived = np.unique(np.abs(pairs))
        for unit in graph.forms[derived[derived >= count] - count].nonzero()[1] + 1:
            starts.append(np.array([unit, unit + count]))
            ends.append(np.zeros(2, np.int64))
    first, last = np.concatenate(starts), np.concatenate(ends)
    links = coo_array((np.ones(len(first), bool), (first, last)), shape=(2 * count, 2 * count))
    label = np.asarray(connected_components(links, directed=False)[1])
    plus, minus = label[:count], label[count:]
    free = (plus != label[0]) & (plus != minus)
    groups, new = np.unique(np.minimum(plus, minus)[free], return_inverse=True)
    own = np.where(plus < minus, 1, -1)
    table = np.zeros(count + graph.forms.shape[0], np.int64)
    table[np.flatnonzero(free)] = (new + 1) * own[free]
    table[count:] = np.arange(graph.forms.shape[0]) + len(groups) + 1
    units = np.flatnonzero(free)
    turn = csr_array((own[free], (units - 1, new)), shape=(graph.num_units, len(groups)))
    mapped = torch.from_numpy(table)

    def moved(ids: Tensor) -> Tensor:
        return mapped[ids.abs()] * ids.sign()

    joined = replace(
        graph,
        blocks=tuple(
            replace(block, tail=moved(block.tail), head=moved(block.head))
            for block in graph.blocks
            if block.name in names
        ),
        num_units=len(groups),
        approximate=np.zeros(0, np.int64),
        exact=csr_array((len(groups), 0), dtype=np.int64),
        forms=csr_array(graph.forms @ turn),
        statistics=tuple(replace(entry, units=moved(entry.units)) for entry in graph.statistics),
        beyond={
            name: (moved(tail), moved(head))
            for name, (tail, head) in graph.beyond.items()
            if name in names
        },
    )
    return joined, turn


__all__ = ["movable"]
