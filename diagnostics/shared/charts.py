"""Charts: Vega-Lite specifications, drawn as SVG that needs no script and
has the colours of the page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree

import vl_convert
from markupsafe import Markup

from .wording import number_text, shortened

Spec = dict[str, Any]
WIDTH, HEIGHT = 400, 170
INK, BLUE, ORANGE = (f"var(--{name})" for name in ("ink", "blue", "orange"))
SHARES = {
    "rank": BLUE,
    "gauge": "var(--green)",
    "symmetric": "var(--h1)",
    "dead": "var(--grey)",
    "undetermined": ORANGE,
    "unexplained": "var(--red)",
}
HUES = tuple(f"var(--h{i})" for i in range(6))
_CONFIG: Spec = json.loads(
    (files("pathspace.diagnostics.shared") / "templates" / "chart.json").read_text("utf-8")
)
_TIPS: Spec = {"description": {"field": "tip", "type": "nominal"}}
_SVG = "http://www.w3.org/2000/svg"
# largest number of names below an axis
MOST_NAMES = 9


# all that is not a character of XML, which the program that draws cannot survive
_NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _legible(value: Any) -> Any:
    """A specification whose texts can be drawn, whatever names are in it."""
    if isinstance(value, str):
        return _NO_TEXT.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {_legible(key): _legible(part) for key, part in value.items()}
    return [_legible(part) for part in value] if isinstance(value, list | tuple) else value


def svg_chart(spec: Spec, label: str, height: int = HEIGHT) -> Markup:
    """A Vega-Lite specification as SVG with a label, and a title for each mark with a ``tip``.

    Args:
        spec: marks, encodings and data.
        label: the name of the chart.
        height: height of the plot, in pixels.
    """
    whole = {
        "width": WIDTH,
        "height": height,
        "background": None,
        "padding": {"left": 18, "right": 8, "top": 5, "bottom": 5},
        "config": _CONFIG,
        **_legible(spec),
    }
    root = ElementTree.fromstring(vl_convert.vegalite_to_svg(whole))
    for parent in root.iter():
        # (remove its classes, which may also be in the page's style sheet)
        dropped = ("aria-roledescription", "class")
        parent.attrib = {
            name: value for name, value in parent.attrib.items() if name not in dropped
        }
        tip = parent.attrib.pop("aria-label", None)
        if parent.attrib.pop("role", None) == "graphics-symbol" and tip and parent is not root:
            ElementTree.SubElement(parent, f"{{{_SVG}}}title").text = tip
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    root.attrib |= {"class": "chart", "role": "img", "aria-label": label}
    ElementTree.register_namespace("", _SVG)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _positive(numbers: Sequence[float | None]) -> list[tuple[int, float]]:
    """Positive numbers with their positions; a logarithmic axis has no place for others."""
    return [(i, v) for i, v in enumerate(numbers) if v is not None and v > 0 and math.isfinite(v)]


def _names(names: Sequence[str], title: str) -> Spec:
    """An axis of positions 0, 1, ..., labelled with as many names as fit."""
    step = -(-len(names) // MOST_NAMES) if names else 1
    shown = list(range(0, len(names), step))
    short = json.dumps([_legible(shortened(name, 22)) for name in names])
    axis: Spec = {
        "values": shown,
        "labelExpr": f"{short}[datum.value]",
        "labelAngle": -30,
        "grid": False,
    }
    scale = {"domain": [-0.5, max(len(names) - 0.5, 0.5)], "nice": False, "zero": False}
    return {"field": "i", "type": "quantitative", "title": title, "axis": axis, "scale": scale}


def _powers(title: str) -> Spec:
    """A logarithmic axis whose values are exponents."""
    axis = {"labelExpr": "format(pow(10, datum.value), '.1~e')", "tickCount": 5}
    return {"type": "quantitative", "title": title, "scale": {"zero": False}, "axis": axis}


def histogram(facts: Mapping[str, Any], label: str, across: str) -> Markup:
    """A histogram over powers of ten.

    Args:
        facts: ``edges`` (exponents) and ``counts``.
        label: the name of the chart.
        across: the title of the horizontal axis.
    """
    edges = facts["edges"]
    rows = [
        {"low": a, "high": b, "count": count, "tip": f"10^{a:.2f} to 10^{b:.2f}: {count:,}"}
        for a, b, count in zip(edges, edges[1:], facts["counts"], strict=False)
        if count
    ]
    x = {**_powers(across), "field": "low", "bin": {"binned": True}}
    if rows and rows[-1]["high"] - rows[0]["low"] < 1:
        # labels of powers of ten are the same along a shorter axis
        middle = (rows[-1]["high"] + rows[0]["low"]) / 2
        x["scale"] = {"zero": False, "nice": False, "domain": [middle - 0.6, middle + 0.6]}
    counts = {"labelExpr": "datum.value ? format(datum.value, '~s') : '0'", "tickCount": 4}
    y = {"field": "count", "type": "quantitative", "title": None, "axis": counts}
    encoding = {"x": x, "x2": {"field": "high"}, "y": y, **_TIPS}
    return svg_chart(
        {"data": {"values": rows}, "mark": {"type": "bar", "color": BLUE}, "encoding": encoding},
        label,
    )


def depth_chart(
    names: Sequence[str],
    values: Sequence[float | None],
    label: str,
    up: str,
    expected: Sequence[float | None] | None = None,
    across: str = "layers in order of execution",
) -> Markup:
    """Positive numbers layer by layer on a logarithmic axis, with theoretical
    values as small strokes.

    Args:
        names: the layers, in order.
        values: one number per layer; a missing or non-positive number leaves a gap.
        label: the name of the chart.
        up: the title of the vertical axis.
        expected: theoretical values.
        across: the title of the horizontal axis.
    """

    def points(numbers: Sequence[float | None], what: str, mark: Spec) -> Spec:
        rows = [
            {"i": i, "log": math.log10(v), "tip": f"{names[i]}: {what}{number_text(v)}"}
            for i, v in _positive(numbers)
        ]
        return {"data": {"values": rows}, "mark": mark, "encoding": encoding}

    encoding = {"x": _names(names, across), "y": {**_powers(up), "field": "log"}, **_TIPS}
    tick = {"type": "tick", "color": ORANGE, "thickness": 2.5, "size": 12, "orient": "horizontal"}
    layers = [
        points(expected or (), "theory ", tick),
        points(values, "", {"type": "line", "color": BLUE, "strokeWidth": 1.5}),
        points(values, "", {"type": "circle", "color": BLUE, "opacity": 1}),
    ]
    return svg_chart({"layer": layers}, label)


def cosines(nodes: Sequence[Mapping[str, Any]], label: str) -> Markup:
    """Cosines of each node of a chain: mean as a bar from zero, 5 to
    95 % of samples as a stroke.
    """
    rows = [
        {
            "i": i,
            "mean": node["cosine_mean"],
            "low": node["cosine_q05"],
            "high": node["cosine_q95"],
            "zero": 0,
            "tip": (
                f"{node['name']}: {node['cosine_mean']:+.4f} (5 %"
                f" {number_text(node['cosine_q05'])}, 95 % {number_text(node['cosine_q95'])}),"
                f" |z|/|x| {number_text(node['direction_over_stream'])}"
            ),
        }
        for i, node in enumerate(nodes)
        if node["cosine_mean"] is not None
    ]
    x = _names([node["name"] for node in nodes], "nodes of the chain in order")
    up = {"type": "quantitative", "title": "cosine with descent", "axis": {"tickCount": 5}}
    size = max(2.0, min(26.0, 0.6 * WIDTH / len(nodes)))
    colour = {"condition": {"test": "datum.mean > 0", "value": BLUE}, "value": ORANGE}
    bars = {"x": x, "y": {**up, "field": "zero"}, "y2": {"field": "mean"}, "color": colour, **_TIPS}
    strokes = {"x": x, "y": {**up, "field": "low"}, "y2": {"field": "high"}, **_TIPS}
    layer = [
        {"mark": {"type": "bar", "width": size}, "encoding": bars},
        {"mark": {"type": "rule", "color": INK, "opacity": 0.6}, "encoding": strokes},
    ]
    return svg_chart({"data": {"values": rows}, "layer": layer}, label)


def shares(parts_of: Sequence[tuple[str, int, str]], label: str) -> Markup:
    """Shares of a whole as one bar with a legend; ``(name, count, class)`` each."""
    total = sum(count for _, count, _ in parts_of) or 1
    names = [f"{name} {count:,}" for name, count, _ in parts_of]
    rows = [
        {
            "name": shown,
            "order": i,
            "count": count,
            "tip": f"{name}: {count:,} ({count / total:.1%})",
        }
        for i, (shown, (name, count, _)) in enumerate(zip(names, parts_of, strict=True))
    ]
    colours = [
        SHARES.get(kind, HUES[(i + 1) % len(HUES)]) for i, (_, _, kind) in enumerate(parts_of)
    ]
    encoding = {
        "x": {"field": "count", "type": "quantitative", "stack": "normalize", "axis": None},
        "color": {"field": "name", "type": "nominal", "scale": {"domain": names, "range": colours}},
        "order": {"field": "order"},
        **_TIPS,
    }
    return svg_chart({"data": {"values": rows}, "mark": "bar", "encoding": encoding}, label, 28)


def both(
    names: Sequence[str], series: Mapping[str, Sequence[float | None]], label: str, up: str
) -> Markup:
    """Positive numbers layer by layer for several models, on one logarithmic axis.

    Args:
        names: the layers, in order.
        series: model -> one number per layer; a missing or non-positive number leaves a gap.
        label: the name of the chart.
        up: the title of the vertical axis.
    """
    values = [
        {
            "i": i,
            "log": math.log10(v),
            "name": model,
            "tip": f"{model}, {names[i]}: {number_text(v)}",
        }
        for model, numbers in series.items()
        for i, v in _positive(numbers)
    ]
    encoding = {
        "x": _names(names, "in order"),
        "y": {**_powers(up), "field": "log"},
        **_TIPS,
    }
    return svg_chart(
        {"data": {"values": values}, "encoding": encoding, "layer": _line(series)}, label
    )


def histograms(facts: Mapping[str, Mapping[str, Any]], label: str, across: str) -> Markup:
    """Histograms over powers of ten for several models, as outlines of shares.

    Args:
        facts: model -> ``edges`` (exponents) and ``counts``.
        label: the name of the chart.
        across: the title of the horizontal axis.
    """
    values = []
    for model, found in facts.items():
        edges, total = found["edges"], sum(found["counts"])
        density = [count / total / (edges[1] - edges[0]) for count in found["counts"]]
        values += [
            {"at": at, "share": share, "name": model}
            for at, share in zip(edges, [*density, 0.0], strict=True)
        ]
    x = {**_powers(across), "field": "at"}
    y = {"field": "share", "type": "quantitative", "title": "share per decade", "stack": None}
    mark = {"type": "area", "interpolate": "step-after", "line": True, "opacity": 0.35}
    encoding = {"x": x, "y": y, "color": _hues(facts)}
    return svg_chart({"data": {"values": values}, "mark": mark, "encoding": encoding}, label)


def _line(names: Iterable[str]) -> list[Spec]:
    """Lines with a dot at each value; a line whose colour is taken is dashed."""
    domain = list(names)
    colour = _hues(domain)
    legend = colour["legend"] and {"symbolType": "stroke", "symbolSize": 220}
    dashes = [[1, 0] if i < len(HUES) else [4, 3] for i in range(len(domain))]
    dashed = {"field": "name", "scale": {"domain": domain, "range": dashes}, "legend": legend}
    line = {"color": {**colour, "legend": legend}, "strokeDash": dashed}
    return [
        {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": line},
        {
            "mark": {"type": "circle", "size": 14, "opacity": 1},
            "encoding": {"color": {**colour, "legend": None}},
        },
    ]


def _hues(names: Iterable[str]) -> Spec:
    """A colour for each name, and a legend unless there is only one name or there are too many."""
    domain = list(names)
    legend: Spec | None = None if len(domain) < 2 or len(domain) > MOST_NAMES else {}
    scale = {"domain": domain, "range": [HUES[i % len(HUES)] for i in range(len(domain))]}
    return {"field": "name", "type": "nominal", "scale": scale, "legend": legend}


def lines(
    rows: Sequence[Mapping[str, float]],
    columns: Mapping[str, str],
    label: str,
    up: str,
    log: bool = False,
) -> Markup:
    """Numbers over the steps of a run, one line for each column.

    Args:
        rows: one mapping per measured step; a missing number leaves a gap.
        columns: column of the rows -> name of the line.
        label: the name of the chart.
        up: the title of the vertical axis.
        log: use a logarithmic axis; numbers that are not positive are left out.
    """
    values = [
        {
            "step": row["step"],
            "value": math.log10(row[column]) if log else row[column],
            "name": name,
            "tip": f"{name}, step {row['step']:.0f}: {row[column]:.4g}",
        }
        for column, name in columns.items()
        for row in rows
        if column in row and (row[column] > 0 or not log)
    ]
    up_axis: Spec = (
        _powers(up) if log else {"type": "quantitative", "title": up, "scale": {"zero": False}}
    )
    axis = {"grid": False, "tickCount": 6}
    x = {"field": "step", "type": "quantitative", "title": "step", "axis": axis}
    encoding = {"x": x, "y": {**up_axis, "field": "value"}, **_TIPS}
    return svg_chart(
        {"data": {"values": values}, "encoding": encoding, "layer": _line(columns.values())}, label
    )
