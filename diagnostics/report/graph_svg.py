"""The reduction graph as SVG: layers as rows beside lanes of units, and single
weights for small graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup, escape

from pathspace.errors import PathspaceError
from pathspace.paths.draw import OUT, SCALAR, Edge, bent_edges, place_nodes, scalar_graph
from pathspace.paths.skeleton import Skeleton

from ..shared.wording import plural, shortened

ROW, LANE, BOX, MARGIN = 36, 34, 360, 44
HUES = 6
MOST_ROWS = 3_000
_NAME = 44


def tag(name: str, content: Any = "", **attributes: Any) -> Markup:
    """One HTML or SVG element with everything escaped; ``class_`` becomes ``class``, and
    underscores become hyphens.

    Example:
        >>> tag("text", "<b>", class_="tick", x=1.25)
        Markup('<text class="tick" x="1.2">&lt;b&gt;</text>')
    """
    shown = [
        f" {key.rstrip('_').replace('_', '-')}="
        f'"{escape(f"{value:.1f}" if isinstance(value, float) else value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return Markup(f"<{name}{''.join(shown)}>{escape(content)}</{name}>")


def lanes(facts: dict[str, Any]) -> Markup:
    """The layers from top to bottom, and to their left one lane for the root and one
    for each group of units.

    The upper wires of a layer come from the groups it reads; the lower wires lead to
    those it writes. Boxes and unit counts have the attributes ``data-layer`` and
    ``data-group`` for the page's script.

    Args:
        facts: from :func:`pathspace.diagnostics.report.graph_layout.describe_layers`.

    Returns:
        An ``<svg>`` element.
    """
    layers, groups = facts["layers"], {group["id"]: group for group in facts["groups"]}
    place = {0: 0, **{number: group["lane"] for number, group in groups.items()}}
    left = MARGIN + (facts["columns"] + 1) * LANE
    width, height = left + BOX + MARGIN, 2 * MARGIN + ROW * len(layers)

    def x(group: int) -> int:
        result: int = MARGIN + place[group] * LANE
        return result

    def y(row: int) -> int:
        return MARGIN + ROW * row + ROW // 2

    under = [tag("line", class_="root", x1=x(0), x2=x(0), y1=MARGIN - 8, y2=height - MARGIN + 8)]
    under.append(
        tag("text", "root", class_="rootname", x=x(0), y=MARGIN - 16, text_anchor="middle")
    )
    over: list[Markup] = []

    def wire(kind: str, group: int, start: int, at: int) -> str:
        kind = kind if group else f"{kind} fixed"
        under.append(tag("line", class_=kind, x1=start, x2=left, y1=at, y2=at))
        return kind

    for group in groups.values():
        start, end = y(group["first"]) + 8, y(group["last"]) - 8
        if group["first"] not in (*group["entering"], *_reading(group, layers)):
            start = y(group["first"])
        hue = f"hue{group['id'] % HUES}"
        at = x(group["id"])
        under.append(tag("line", class_=f"lane {hue}", x1=at, x2=at, y1=start, y2=max(end, start)))
        over.append(_pill(group, at, y(group["first"]) + ROW // 2, hue))
    for row, layer in enumerate(layers):
        red = any(tensor["skeleton"] for tensor in layer["tensors"])
        kind = "wire skeleton" if red else "wire"
        upper, lower, after = y(row) - 8, y(row) + 8, layer["after"]
        for number in layer["reads"]:
            if number or after is None:
                drawn = wire(kind, number, x(number), upper)
                under.append(tag("circle", class_=drawn, cx=x(number), cy=upper, r=3))
        if after is not None:
            wire("wire through", after, x(after), upper)
        for number in layer["writes"]:
            drawn = wire(kind, number, x(number) + 4, lower)
            tip = f"M{x(number) + 2} {lower} l8 -4 v8 z"
            under.append(tag("path", class_=f"{drawn} tip", d=tip))
        over.append(_box(layer, row, left, y(row), red))
    return tag(
        "svg",
        Markup("").join([*under, *over]),
        id="graph",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        role="group",
        aria_label="The reduction graph, layer by layer",
    )


def _reading(group: dict[str, Any], layers: list[dict[str, Any]]) -> list[int]:
    """Rows that read a group, normalisations included."""
    return [
        *group["leaving"],
        *(i for i, layer in enumerate(layers) if layer["after"] == group["id"]),
    ]


def _pill(group: dict[str, Any], x: int, y: int, hue: str) -> Markup:
    text = f"{group['units']:,}"
    wide = 10 + 6 * len(text)
    parts = [
        tag("rect", class_=f"pill {hue}", x=x - wide / 2, y=y - 7, width=wide, height=14, rx=7),
        tag("text", text, x=x, y=y + 4, text_anchor="middle"),
    ]
    return _button("group", group["id"], parts, plural(group["units"], "unit"))


def _box(layer: dict[str, Any], row: int, x: int, y: int, red: bool) -> Markup:
    main = max(layer["tensors"], key=lambda tensor: int(np.prod(tensor["shape"])))
    shape = "x".join(map(str, main["shape"])) or "scalar"
    name = layer["name"] or "(model)"
    shown = shortened(name, _NAME - len(shape))
    parts = [
        tag("title", name),
        tag(
            "rect",
            class_="box skeleton" if red else "box",
            x=x,
            y=y - 14,
            width=BOX,
            height=28,
            rx=5,
        ),
        tag("text", shown, class_="name", x=x + 12, y=y + 4),
        tag("text", shape, class_="shape", x=x + BOX - 10, y=y + 4, text_anchor="end"),
    ]
    return _button("layer", row, parts, f"Layer {name}")


def _button(kind: str, number: int, parts: list[Markup], label: str) -> Markup:
    """A part of the picture that the page's script finds by its kind and number."""
    known = {
        "class": kind,
        f"data-{kind}": number,
        "tabindex": 0,
        "role": "button",
        "aria-label": label,
    }
    return tag("g", Markup("").join(parts), **known)


def weights(skeleton: Skeleton) -> Markup | None:
    """Units as circles, single weights as arrows, the skeleton red; ``None``
    for more than 150 weights.
    """
    if not 0 < skeleton.graph.num_weights <= SCALAR:
        return None
    try:
        graph = scalar_graph(skeleton, None)
    except PathspaceError:
        return None
    places, inches = place_nodes(graph), np.array([130.0, -46.0])
    edges = list(bent_edges(graph, places, np.array([1.9, 0.8])))
    corners = np.array([place * inches for place in places.values()])
    low, high = corners.min(0) - 40, corners.max(0) + 40
    parts = [
        _arrow(edge, places, inches)
        for edge in sorted(edges, key=lambda edge: bool(edge[2]["red"]))
    ]
    for node, place in places.items():
        x, y = (place * inches).tolist()
        text = str(node)
        if isinstance(node, tuple):
            text = "1" if node[1] == "1" else f"{'xy'[node[0] == OUT]}{node[1]}"
        kind = "unit fixed" if isinstance(node, tuple) else "unit"
        parts.append(tag("circle", class_=kind, cx=x, cy=y, r=15))
        parts.append(tag("text", text, class_="unitname", x=x, y=y + 4, text_anchor="middle"))
    size = high - low
    return tag(
        "svg",
        Markup("").join(parts),
        class_="scalars",
        viewBox=f"{low[0]:.0f} {low[1]:.0f} {size[0]:.0f} {size[1]:.0f}",
        role="img",
        aria_label="Every weight of the reduction graph",
        style=f"max-width: {size[0] * 1.3:.0f}px",
    )


def _arrow(edge: Edge, places: Any, inches: np.ndarray) -> Markup:
    one, other, entry, bend = edge
    kind = "weight skeleton" if entry["red"] else "weight"
    start, end = places[one] * inches, places[other] * inches
    if one == other:
        x, y = start.tolist()
        loop = (
            f"M{x - 8:.1f} {y - 13:.1f} C{x - 30:.1f} {y - 52:.1f} {x + 30:.1f} {y - 52:.1f}"
            f" {x + 8:.1f} {y - 13:.1f}"
        )
        return tag("path", class_=kind, d=loop)
    along = end - start
    # the picture's y axis points down, so the curve bends to the other side
    middle = (start + end) / 2 - bend * np.array([along[1], -along[0]])
    first, last = (
        (middle - start) / np.linalg.norm(middle - start),
        (end - middle) / np.linalg.norm(end - middle),
    )
    start, end = start + 15 * first, end - 17 * last
    side = np.array([-last[1], last[0]])
    tip = [end - 7 * last + 3 * side, end - 7 * last - 3 * side]
    path = (
        f"M{start[0]:.1f} {start[1]:.1f} Q{middle[0]:.1f} {middle[1]:.1f} {end[0]:.1f} {end[1]:.1f}"
        f" M{tip[0][0]:.1f} {tip[0][1]:.1f} L{end[0]:.1f} {end[1]:.1f} L{tip[1][0]:.1f}"
        f" {tip[1][1]:.1f}"
    )
    return tag("path", class_=kind, d=path)
