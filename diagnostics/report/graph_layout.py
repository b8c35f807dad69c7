"""The layout of the reduction graph for the page: a column of layers beside lanes
of units, as plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pathspace.errors import PathspaceError
from pathspace.graph.parts import WeightBlock
from pathspace.graph.structure import Structure
from pathspace.models.values import has_values
from pathspace.paths.draw import unit_groups
from pathspace.paths.skeleton import Skeleton

CELLS = 40
ROOT = 0


@dataclass
class Layer:
    """Tensors of one module between the same groups of units.

    Attributes:
        name: the module, with the tensor's own name where a module has several layers.
        module: the module.
        blocks: positions of its tensors in the graph.
        reads: groups of units from which its edges come; 0 is the root.
        writes: groups of units to which its edges lead.
        after: for an affine normalisation, the group of units that it normalises.
    """

    name: str
    module: str
    blocks: list[int]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: int | None = None


@dataclass
class Lane:
    """A group of units that enter and leave the same tensors.

    Attributes:
        units: their ids.
        first, last: rows between which the lane runs.
        place: its column; the root has column 0.
    """

    units: np.ndarray
    first: int
    last: int
    place: int = 0


def arrange(graph: Structure) -> tuple[list[Layer], dict[int, Lane]]:
    """Find layers, in the order in which the model uses them, and lanes, each
    in the first free column.

    Args:
        graph: a reduction graph.

    Returns:
        The layers (rows of the picture) and the lanes by group number, 1 and up.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> layers, lanes = arrange(ps.trace(model, torch.randn(1, 2)))
        >>> [(layer.name, layer.reads, layer.writes) for layer in layers], lanes[1].units.tolist()
        ([('0', (0,), (1,)), ('2', (1,), (0,))], [1, 2, 3])
    """
    label, sides = unit_groups(graph)
    order = _order(graph)
    numbers: dict[int, int] = {0: ROOT}
    layers: list[Layer] = []
    for i in order:
        ends = [sorted({int(key) for key in label[units]} or {0}) for units in sides[i]]
        for key in (*ends[0], *ends[1]):
            numbers.setdefault(key, len(numbers))
        reads, writes = (tuple(sorted(numbers[key] for key in side)) for side in ends)
        reads = tuple(g for g in reads if g) or reads
        writes = tuple(g for g in writes if g) or writes
        block = graph.blocks[i]
        module, own = _split(block.name)
        last = layers[-1] if layers else None
        bias = len(block.shape) < 2 and reads == (ROOT,)
        same = last is not None and last.module == module and last.writes == writes
        if last is not None and same and (bias or last.reads == reads):
            last.blocks.append(i)
            continue
        several = any(layer.module == module for layer in layers)
        layer = Layer(
            f"{module}.{own}" if several and module else module or own, module, [i], reads, writes
        )
        layers.append(layer)
    for layer in layers:
        own = _split(graph.blocks[layer.blocks[0]].name)[1]
        if (
            sum(other.module == layer.module for other in layers) > 1
            or "weight" not in own + layer.name
        ):
            layer.name = graph.blocks[layer.blocks[0]].name
    _normalised(graph, layers, label, numbers)
    return layers, _lanes(layers, label, numbers)


def _split(name: str) -> tuple[str, str]:
    module, _, own = name.rpartition(".")
    if own in (
        "original0",
        "original1",
        "original",
    ):  # torch's parametrisations store the tensor one level down
        module = module.replace(".parametrizations", "")
        module, _, own = module.rpartition(".")
    return module, own


def _order(graph: Structure) -> list[int]:
    """Blocks in the order of the first operation that uses them, then in the order of the model."""
    first: dict[str, int] = {}
    nodes = list(graph.captured.graph.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        kind, name = graph.captured.sources.get(node.name, ("", ""))
        if node.op == "placeholder" and kind == "parameter" and name in graph.index:
            block = graph.blocks[graph.index[name]].name
            used = min((position[user] for user in node.users), default=len(nodes))
            first[block] = min(used, first.get(block, used))
    return sorted(
        range(len(graph.blocks)), key=lambda i: (first.get(graph.blocks[i].name, len(nodes)), i)
    )


def _normalised(
    graph: Structure, layers: Sequence[Layer], label: np.ndarray, numbers: dict[int, int]
) -> None:
    """Find the group that each affine normalisation normalises; the picture joins
    them, although no path does.
    """
    sizes = {numbers[int(key)]: int((label[1:] == key).sum()) for key in np.unique(label[1:])}
    read = {group for layer in layers for group in layer.reads}
    dangling: int | None = None
    for layer in layers:
        blocks = [graph.blocks[i] for i in layer.blocks]
        if all(len(block.shape) < 2 for block in blocks) and layer.reads == (ROOT,):
            if (
                dangling is not None
                and sizes.get(dangling) in (blocks[0].numel, 1)
                and dangling not in layer.writes
            ):
                layer.after = dangling
            dangling = None
        else:
            ends = [group for group in layer.writes if group and group not in read]
            dangling = ends[0] if len(ends) == 1 else None


def _lanes(layers: Sequence[Layer], label: np.ndarray, numbers: dict[int, int]) -> dict[int, Lane]:
    lanes: dict[int, Lane] = {}
    members = {numbers[int(key)]: np.flatnonzero(label == key) for key in np.unique(label[1:])}
    for row, layer in enumerate(layers):
        for group in (*layer.reads, *layer.writes, *([] if layer.after is None else [layer.after])):
            if group == ROOT:
                continue
            lane = lanes.setdefault(group, Lane(members[group], row, row))
            lane.last = row
    busy: list[int] = []  # last row of the lane in each column
    for lane in sorted(lanes.values(), key=lambda lane: (lane.first, -lane.last)):
        free = next((place for place, until in enumerate(busy) if until < lane.first), len(busy))
        busy[free : free + 1] = [lane.last]
        lane.place = free + 1
    return lanes


def describe_layers(skeleton: Skeleton, scales: Skeleton | None = None) -> dict[str, Any]:
    """Layers and lanes with masks, units and scales, as plain values for the page.

    Args:
        skeleton: the two trees of a reduction graph.
        scales: the trees from which the scales of units are computed, if not the same ones.

    Returns:
        ``{"layers": [...], "groups": [...], "columns": ...}``.
    """
    graph = skeleton.graph
    layers, lanes = arrange(graph)
    try:
        walks = scales or skeleton
        logs: tuple[np.ndarray, np.ndarray] | None = (walks.log_prefixes(), walks.log_suffixes())
    except PathspaceError:  # a weight of the skeleton is 0, and a product along it has no logarithm
        logs = None
    approximate = set(np.asarray(graph.approximate).tolist())
    groups = [
        {
            "id": number,
            "units": len(lane.units),
            "ids": _spans(lane.units),
            "approximate": sum(unit in approximate for unit in lane.units.tolist()),
            "lane": lane.place,
            "first": lane.first,
            "last": lane.last,
            "entering": [row for row, layer in enumerate(layers) if number in layer.writes],
            "leaving": [row for row, layer in enumerate(layers) if number in layer.reads],
            "prefix": None if logs is None else _quantiles(logs[0][lane.units]),
            "suffix": None if logs is None else _quantiles(logs[1][lane.units]),
        }
        for number, lane in sorted(lanes.items())
    ]
    return {
        "layers": [
            {
                "name": layer.name,
                "module": layer.module,
                "reads": list(layer.reads),
                "writes": list(layer.writes),
                "after": layer.after,
                "tensors": [_tensor(skeleton, graph.blocks[i]) for i in layer.blocks],
            }
            for layer in layers
        ],
        "groups": groups,
        "columns": max((lane.place for lane in lanes.values()), default=0),
    }


def _tensor(skeleton: Skeleton, block: WeightBlock) -> dict[str, Any]:
    incoming, outgoing = map(np.unique, skeleton.positions(block.name))
    parameter, rms = skeleton.graph.parameters[block.name], None
    if has_values(parameter):
        rms = (
            float(block.values(parameter).square().mean(dtype=torch.float64).sqrt())
            if block.numel
            else 0.0
        )
    return {
        "name": block.name,
        "aliases": list(block.aliases),
        "shape": list(block.shape),
        "edges": block.num_edges,
        "unused": block.numel - block.num_edges,
        "incoming": len(incoming),
        "outgoing": len(outgoing),
        "skeleton": len(np.union1d(incoming, outgoing)),
        "rms": rms,
        "mask": _picture(incoming, outgoing, block.shape),
    }


def _picture(
    incoming: np.ndarray, outgoing: np.ndarray, shape: tuple[int, ...]
) -> dict[str, Any] | None:
    """The skeleton's weights in a tensor, as a grid of at most 40 x 40 cells: 1
    in-tree, 2 out-tree, 3 both.
    """
    if not len(incoming) and not len(outgoing):
        return None
    shape = shape or (1,)
    rows, columns = (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (1, shape[0])
    # the taps of a kernel share the cell of their two channels
    taps = int(np.prod(shape[2:])) if len(shape) > 2 and shape[0] * shape[1] > 1 else 1
    columns //= taps
    high, wide = min(rows, CELLS), min(columns, CELLS)
    found: dict[tuple[int, int], int] = {}
    for places, kind in ((incoming, 1), (outgoing, 2)):
        row, column = places // (columns * taps), places // taps % columns
        cells_met = np.unique(np.stack([row * high // rows, column * wide // columns], 1), axis=0)
        for key in map(tuple, cells_met.tolist()):
            found[key] = found.get(key, 0) | kind
    cells = [[row, column, kind] for (row, column), kind in sorted(found.items())]
    return {"rows": rows, "columns": columns, "high": high, "wide": wide, "cells": cells}


def _spans(ids: np.ndarray) -> str:
    """Consecutive ids joined: ``"1-3, 7"``."""
    if not len(ids):
        return ""
    parts = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts[:6]]
    return ", ".join(texts) + (f" and {len(parts) - 6:,} more spans" if len(parts) > 6 else "")


def _quantiles(logs: np.ndarray) -> list[float]:
    """Smallest, median and largest, as powers of ten."""
    return (np.quantile(logs, (0, 0.5, 1)) / np.log(10)).tolist() if len(logs) else [0.0, 0.0, 0.0]
