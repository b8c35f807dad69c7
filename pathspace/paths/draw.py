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
from ..shown import shorten
from .basis import BasisPaths, Path
from .two_trees import TwoTrees

if TYPE_CHECKING:
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
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(2, 3), ReLU(), Linear(3, 1))
        >>> figure = ps.draw(ps.trace(model, torch.randn(1, 2)).skeleton())
        >>> figure.axes[0].get_title(loc="left")
        '13 weights, 3 units, 10 basis paths; blue: 0.weight[0,0] 2.weight[0,0]'
    """
    expect_arguments("draw", skeleton=skeleton)
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
    if not graph:
        raise UnsupportedError(
            "draw found no weight in path space, expected one at least; there is nothing to draw."
        )
    title = (
        f"{weights:,} weights, {skeleton.graph.num_units:,} units,"
        f" {len(BasisPaths(skeleton)):,} basis paths"
    )
    figure = _painted(graph, scalar, title if chosen is None else f"{title}; blue: {chosen}")
    if file is not None:
        save_picture(figure, file, dpi=150)
    return figure


def _chosen(skeleton: TwoTrees, path: int | Path | None) -> Path | None:
    basis = BasisPaths(skeleton)
    if isinstance(path, Path):
        return path
    if path is None:
        # (of those along the edges, if there are any)
        return max(basis, key=lambda p: int((p.counts > 0).all()) * len(p.numbers), default=None)
    if not isinstance(path, int | np.integer) or not -len(basis) <= path < len(basis):
        raise InputError(
            f"draw found path={path!r}, expected the number of one of the {len(basis):,} basis"
            " paths."
        )
    return basis[path]


def scalar_graph(skeleton: TwoTrees, chosen: Path | None) -> nx.MultiDiGraph:
    """Single weights; the root is taken apart into inputs, the constant one, and outputs."""
    graph, result = skeleton.graph, nx.MultiDiGraph()
    red, blue = set(skeleton.edges().tolist()), set(() if chosen is None else chosen.numbers)
    ends = zip(*(ids.tolist() for ids in graph.ends()), strict=True)
    every = Path.from_edges(graph, range(graph.num_weights)).edges
    for number, ((tail, head), (_, index, _)) in enumerate(zip(ends, every, strict=True)):
        one: Hashable = abs(tail) or (IN, index[1] if len(index) > 1 else "1")
        other: Hashable = abs(head) or (OUT, index[0] if index else 0)
        # the sides of a weight between opposite scales, dashed, are shown as they are written
        style = {"red": number in red, "blue": number in blue, "text": ""}
        result.add_edge(one, other, dashed=tail < 0 or head < 0, **style)
    return result


def unit_groups(graph: Structure) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Number units (0: root), equal if they meet the same sides; and units at each block's ends."""
    expand = abs(graph.expand).tocsr()

    def members(ids: Any) -> np.ndarray:
        rows = expand[np.unique(np.abs(ids.numpy()))]
        return np.asarray(np.unique(rows.indices[rows.data != 0]))

    sides = [(members(block.tail), members(block.head)) for block in graph.blocks]
    codes = np.random.default_rng(0).integers(1 << 50, size=(len(sides), 2))
    label = np.ones(graph.num_units + 1, np.int64)
    for pair, own in zip(sides, codes.tolist(), strict=True):
        for units, code in zip(pair, own, strict=True):
            label[units] += code
    label[0] = 0
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
    parts = nx.condensation(graph)
    levels = list(nx.topological_generations(parts))
    column = {
        node: number
        for number, level in enumerate(levels)
        for part in level
        for node in parts.nodes[part]["members"]
    }
    columns: dict[int, list[Hashable]] = {}
    for node in graph.nodes:
        ends = node == OUT or (isinstance(node, tuple) and node[0] == OUT)
        columns.setdefault(len(levels) - 1 if ends else column[node], []).append(node)
    return {
        node: np.array([float(number), (len(nodes) - 1) / 2 - row])
        for number, nodes in columns.items()
        for row, node in enumerate(nodes)
    }


def bent_edges(graph: nx.MultiDiGraph, places: Places, inches: np.ndarray) -> Iterable[Edge]:
    """Edges with a curvature that keeps parallel and returning ones apart."""
    for one, other, number, entry in graph.edges(keys=True, data=True):
        reach = (places[other] - places[one]) * inches
        length = max(float(np.hypot(*reach)), 1.0)
        level = abs(reach[1]) < 0.3
        base = 0.3 if reach[0] <= 0 else -0.3 if reach[0] > 3 and level else 0.0
        apart = 0.14 * (number - (graph.number_of_edges(one, other) - 1) / 2)
        # long curves stay flat
        yield one, other, entry, base * min(1.0, 6.0 / length) + apart * min(1.0, 4.0 / length)


def _middle(start: np.ndarray, end: np.ndarray, bend: float) -> np.ndarray:
    if np.array_equal(start, end):
        return np.asarray(start + np.array([0, 0.45]))
    across = np.array([end[1] - start[1], start[0] - end[0]])
    return np.asarray((start + end) / 2 + bend / 2 * across)


def _painted(graph: nx.MultiDiGraph, scalar: bool, title: str) -> Figure:
    from matplotlib.figure import Figure

    places, inches = place_nodes(graph), np.array([1.9, 0.8 if scalar else 1.0])
    edges = list(bent_edges(graph, places, inches))
    positions = {node: place * inches for node, place in places.items()}
    middles = [_middle(positions[one], positions[other], bend) for one, other, _, bend in edges]
    corners = [*positions.values(), *middles]
    low, high = np.min(corners, 0) - 0.8, np.max(corners, 0) + np.array([0.8, 1.0])
    width, height = np.maximum(high - low, [6.0, 2.5]).tolist()
    figure = Figure(figsize=(width, height))
    # one inch is one inch: curves are bent on paper, and their middles have to be known
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set(xlim=(low[0], low[0] + width), ylim=(low[1], low[1] + height))
    title = shorten(title, int(12 * width))
    axes.set_title(title, loc="left", fontsize=10, x=0.1 / width, y=1.0, pad=-16)

    centred: dict[str, Any] = {"ha": "center", "va": "center"}
    plain: dict[str, Any] = {"boxstyle": "round,pad=0.15", "color": "white", "alpha": 0.8}
    thin, gap = (0.6 if len(edges) > 60 else 1.0, 11) if scalar else (1.4, 24)
    for (one, other, entry, bend), middle in zip(edges, middles, strict=True):
        start, end, shrink = positions[one], positions[other], gap
        if one == other:
            aside, above = np.array([0.12, 0.0]), start + np.array([0.0, 0.1])
            start, end, bend, shrink = above - aside, above + aside, -2.5, 2
        thick = 2.8 if entry["blue"] else 1.4 if entry["red"] else thin
        arrow: dict[str, Any] = {
            "arrowstyle": "-|>",
            "connectionstyle": f"arc3,rad={bend}",
            "color": BLUE if entry["blue"] else RED if entry["red"] else GREY,
            "linestyle": "--" if entry["dashed"] else "-",
            "linewidth": thick,
            "mutation_scale": 8 + thick,
            "shrinkA": shrink,
            "shrinkB": shrink,
        }
        # (blue above red above grey)
        axes.annotate("", end, start, arrowprops=arrow, zorder=1 + thick / 10)
        if entry["text"]:
            x, y = middle.tolist()
            axes.text(x, y, entry["text"], fontsize=6, bbox=plain, zorder=4, **centred)
    for node, (x, y) in positions.items():
        inner = "#eeeeee" if node in (IN, OUT) or isinstance(node, tuple) else "white"
        shape = "circle" if scalar else "round,pad=0.4"
        box: dict[str, Any] = {"boxstyle": shape, "facecolor": inner, "edgecolor": "black"}
        axes.text(x, y, _label(graph, node), fontsize=8, bbox=box, zorder=3, **centred)
    return figure


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
