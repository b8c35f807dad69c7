"""Pictures of the reduction graph: unit groups and tensors for any model,
single weights for small ones.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

from ..errors import InputError, UnsupportedError, expect_arguments
from ..files.writing import FORMATS, expect_suffix, save_picture
from .basis import BasisPaths, Path
from .two_trees import TwoTrees

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..graph.structure import Structure

SCALAR = 150
MOST_SCALAR = 1_000
MOST_GROUPS = 2_000
RED, GREY, BLUE = "#c8102e", "#9a9a9a", "#1f6fd6"
IN, OUT = "in", "out"
Places = dict[Hashable, np.ndarray]
Edge = tuple[Hashable, Hashable, dict[str, Any], float]


def draw(
    skeleton: TwoTrees,
    file: str | os.PathLike[str] | None = None,
    level: str = "auto",
    path: int | Path | None = None,
) -> Figure:
    """Draw a reduction graph with its skeleton.

    *Block level*: boxes are groups of units that meet the same tensors, arrows are weight
    tensors, red where they hold skeleton weights. *Scalar level*: circles are units, arrows single
    weights, the skeleton red, one basis path blue.

    Args:
        skeleton: the two trees of a reduction graph.
        file: where to write the picture, as ``.svg``, ``.png`` or ``.pdf``; nowhere by default.
        level: ``"block"``, ``"scalar"``, or ``"auto"``: scalar up to 150 weights.
        path: the path to highlight at scalar level: a path, or the number of a basis path
            (the longest by default).

    Returns:
        The matplotlib figure.

    Raises:
        InputError: unknown level or file type, or no such basis path.
        UnsupportedError: too many weights for the scalar level, or too many groups of units.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> figure = ps.draw(ps.trace(model, torch.randn(1, 2)).skeleton())
        >>> figure.axes[0].get_title(loc="left")
        '13 weights, 3 units, 10 basis paths; blue: 0.weight[0,0] 2.weight[0,0]'
    """
    expect_arguments("draw", skeleton=skeleton)
    from matplotlib.figure import Figure

    if level not in ("auto", "block", "scalar"):
        raise InputError(f"draw found level={level!r}, expected 'auto', 'block' or 'scalar'.")
    if file is not None:
        expect_suffix(file, "draw", FORMATS)
    weights = skeleton.graph.num_weights
    scalar = level == "scalar" or (level == "auto" and weights <= SCALAR)
    if scalar and weights > MOST_SCALAR:
        raise UnsupportedError(
            f"draw found {weights:,} weights and shows at most {MOST_SCALAR:,} single weights; use"
            " level='block'."
        )
    chosen = _chosen(skeleton, path) if scalar else None
    graph = scalar_graph(skeleton, chosen) if scalar else _blocks(skeleton)
    places = place_nodes(graph)
    inches = np.array([1.9, 0.8 if scalar else 1.0])
    edges = list(bent_edges(graph, places, inches))
    if not places:
        raise UnsupportedError(
            "draw found no weight in path space, expected one at least; there is nothing to draw."
        )
    positions = {node: place * inches for node, place in places.items()}
    middles = [_middle(positions[one], positions[other], bend) for one, other, _, bend in edges]
    corners = [*positions.values(), *middles]
    low, high = np.min(corners, 0) - 0.8, np.max(corners, 0) + np.array([0.8, 1.0])
    size = np.maximum(high - low, [6.0, 2.5])
    figure = Figure(figsize=(float(size[0]), float(size[1])))
    # one inch is one inch: curves are bent on paper, and their middles have to be known
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(low[0], low[0] + size[0])
    axes.set_ylim(low[1], low[1] + size[1])
    _paint(axes, graph, positions, edges, scalar)
    title = (
        f"{weights:,} weights, {skeleton.graph.num_units:,} units,"
        f" {len(BasisPaths(skeleton)):,} basis paths"
    )
    room = int(12 * size[0])
    if chosen is not None:
        title = f"{title}; blue: {chosen}"
        title = title if len(title) <= room else title[: room - 3] + "..."
    axes.set_title(title, loc="left", fontsize=10, x=0.1 / size[0], y=1.0, pad=-16)
    if file is not None:
        save_picture(figure, file, dpi=150)
    return figure


def _chosen(skeleton: TwoTrees, path: int | Path | None) -> Path | None:
    basis = BasisPaths(skeleton)
    if isinstance(path, Path):
        return path
    if path is None:
        return max(
            basis,
            key=lambda entry: int((entry.counts > 0).all()) * len(entry.numbers),
            default=None,
        )
    if not isinstance(path, int | np.integer) or not -len(basis) <= path < len(basis):
        raise InputError(
            f"draw found path={path!r}, expected the number of one of the {len(basis):,} basis"
            " paths."
        )
    return basis[path]


def scalar_graph(skeleton: TwoTrees, chosen: Path | None) -> nx.MultiDiGraph:
    """Single weights; the root is taken apart into inputs, the constant one, and outputs."""
    graph, result = skeleton.graph, nx.MultiDiGraph()
    tails, heads = graph.ends()
    wanted = set() if chosen is None else set(chosen.numbers.tolist())
    number = 0
    for block in graph.blocks:
        shape, mask = block.shape, skeleton.mask(block.name).reshape(-1)
        for flat in block.places.tolist():
            index = [int(i) for i in np.unravel_index(flat, shape)] if shape else []
            tail, head = int(tails[number]), int(heads[number])
            one: Hashable = abs(tail) or ((IN, index[1]) if len(index) > 1 else (IN, "1"))
            other: Hashable = abs(head) or (OUT, index[0] if index else 0)
            # the sides of a weight between opposite scales, dashed, are shown as they are written
            style = {"red": bool(mask[flat]), "blue": number in wanted, "text": ""}
            result.add_edge(one, other, dashed=tail < 0 or head < 0, **style)
            number += 1
    return result


def unit_groups(graph: Structure) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Number units (0: root), equal if they meet the same sides; and units at each block's ends."""
    expand = abs(graph.expand).tocsr()

    def members(ids: Any) -> np.ndarray:
        rows = expand[np.unique(np.abs(ids.numpy()))]
        return np.asarray(np.unique(rows.indices[rows.data != 0]))

    label = np.zeros(graph.num_units + 1, np.int64)
    label[1:] = 1
    sides = [(members(block.tail), members(block.head)) for block in graph.blocks]
    for i, pair in enumerate(sides):
        for side, units in enumerate(pair):
            units = units[units > 0]
            if len(units):
                label[units] = (label[units] * 2_654_435_761 + 2 * i + side + 1) % (1 << 61)
    return label, sides


def _blocks(skeleton: TwoTrees) -> nx.MultiDiGraph:
    graph, result = skeleton.graph, nx.MultiDiGraph()
    label, sides = unit_groups(graph)
    groups = {int(key): int((label[1:] == key).sum()) for key in np.unique(label[1:])}
    if len(groups) > MOST_GROUPS:
        raise UnsupportedError(
            f"draw found {len(groups):,} groups of units and shows up to {MOST_GROUPS:,}."
        )
    for key, count in groups.items():
        result.add_node(key, units=count, vectors=0)
    for block, (tail, head) in zip(graph.blocks, sides, strict=True):
        starts = {int(label[u]) if u else IN for u in tail.tolist()} or {IN}
        ends = {int(label[u]) if u else OUT for u in head.tolist()} or {OUT}
        if len(block.shape) < 2 and starts == {IN}:
            for end in ends:
                result.add_node(end)
                result.nodes[end]["vectors"] = result.nodes[end].get("vectors", 0) + 1
            continue
        text = f"{block.name}\n{'x'.join(map(str, block.shape))}"
        red = any(map(len, skeleton.positions(block.name)))
        for start, end in product(starts - {IN} or starts, ends - {OUT} or ends):
            result.add_edge(start, end, red=red, blue=False, dashed=False, text=text)
            text = ""
    return result


def place_nodes(graph: nx.MultiDiGraph) -> Places:
    """Columns by longest way from the inputs (circles of units share one), evenly spaced rows."""
    small, column, start = nx.condensation(graph), dict[Hashable, int](), 0
    for level in nx.topological_generations(small):
        orders = [_order(graph, small.nodes[part]["members"]) for part in level]
        column |= {node: start + step for order in orders for node, step in order.items()}
        start += max(max(order.values()) for order in orders) + 1
    for node in graph.nodes:
        if node == OUT or (isinstance(node, tuple) and node[0] == OUT):
            column[node] = max(column.values())
    columns: dict[int, list[Hashable]] = {}
    for node in graph.nodes:
        columns.setdefault(column[node], []).append(node)
    return {
        node: np.array([float(number), (len(nodes) - 1) / 2 - row])
        for number, nodes in columns.items()
        for row, node in enumerate(nodes)
    }


def _order(graph: nx.MultiDiGraph, nodes: set[Hashable]) -> dict[Hashable, int]:
    """Order within a circle, by distance from where it is entered."""
    entered = [
        node for node in nodes if any(before not in nodes for before in graph.predecessors(node))
    ]
    starts = set(entered) or {next(iter(nodes))}
    found: dict[Hashable, int] = nx.multi_source_dijkstra_path_length(graph.subgraph(nodes), starts)
    return found


def _arrow(
    axes: Axes, ends: tuple[Any, Any], bend: float, width: float, shrink: float, **style: Any
) -> None:
    from matplotlib.patches import FancyArrowPatch

    one, other = ((float(x), float(y)) for x, y in ends)
    if one == other:
        x, y = one
        one, other, bend, shrink = (x - 0.12, y + 0.1), (x + 0.12, y + 0.1), -2.5, 2
    style |= {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}"}
    style |= {"linewidth": width, "mutation_scale": 8 + width, "zorder": 1 + width / 10}
    axes.add_patch(FancyArrowPatch(one, other, shrinkA=shrink, shrinkB=shrink, **style))


def bent_edges(graph: nx.MultiDiGraph, places: Places, inches: np.ndarray) -> Iterable[Edge]:
    """Edges with a curvature that keeps parallel and returning ones apart."""
    for one, other in dict.fromkeys((u, v) for u, v in graph.edges()):
        entries = list(graph[one][other].values())
        reach = (places[other] - places[one]) * inches
        length = max(float(np.hypot(*reach)), 1.0)
        level = abs(reach[1]) < 0.3
        base = 0.3 if reach[0] <= 0 else -0.3 if reach[0] > 3 and level else 0.0
        # long curves stay flat
        base *= min(1.0, 6.0 / length)
        for i, entry in enumerate(entries):
            apart = 0.14 * (i - (len(entries) - 1) / 2) * min(1.0, 4.0 / length)
            yield one, other, entry, base + apart


def _middle(start: np.ndarray, end: np.ndarray, bend: float) -> np.ndarray:
    if np.array_equal(start, end):
        return np.asarray(start + np.array([0, 0.45]))
    across = np.array([end[1] - start[1], start[0] - end[0]])
    return np.asarray((start + end) / 2 + bend / 2 * across)


def _paint(
    axes: Axes, graph: nx.MultiDiGraph, positions: Places, edges: list[Edge], scalar: bool
) -> None:
    thin, shrink = (0.6 if len(edges) > 60 else 1.0, 11) if scalar else (1.4, 24)
    round_box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8}
    for one, other, entry, bend in sorted(
        edges, key=lambda edge: (edge[2]["blue"], edge[2]["red"])
    ):
        color = BLUE if entry["blue"] else RED if entry["red"] else GREY
        width = 2.8 if entry["blue"] else 1.4 if entry["red"] else thin
        line = "--" if entry["dashed"] else "-"
        ends = positions[one], positions[other]
        _arrow(axes, ends, bend, width, shrink, color=color, linestyle=line)
        if entry["text"]:
            x, y = _middle(*ends, bend).tolist()
            box = round_box | {"edgecolor": "none"}
            axes.text(x, y, entry["text"], ha="center", va="center", fontsize=6, bbox=box, zorder=4)
    for node, (x, y) in positions.items():
        color = "#eeeeee" if node in (IN, OUT) or isinstance(node, tuple) else "white"
        box = {"boxstyle": "circle" if scalar else "round,pad=0.4"}
        box |= {"facecolor": color, "edgecolor": "black"}
        text = _label(graph, node)
        axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box, zorder=3)


def _label(graph: nx.MultiDiGraph, node: Hashable) -> str:
    """A unit's number, an input or an output; or what a box of blocks stands for."""
    if isinstance(node, tuple):
        return "1" if node[1] == "1" else f"{'xy'[node[0] == OUT]}{node[1]}"
    facts = graph.nodes[node]
    count, vectors = facts.get("units"), facts.get("vectors", 0)
    text = {IN: "inputs", OUT: "outputs"}.get(str(node), str(node))
    if count is not None:
        text = f"{count:,} unit{'s' * (count != 1)}"
    return text + (f"\n+ {vectors} vector{'s' * (vectors != 1)}" if vectors else "")
