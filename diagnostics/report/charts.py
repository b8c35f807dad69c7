"""Charts as inline SVG: text that people can select, colours from the page's style sheet, hover titles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from pathspace.diagnostics.report.sentences import number

WIDTH, HEIGHT = 640, 230
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40


def tag(name: str, content: Any = "", **attributes: Any) -> Markup:
    """One element, everything escaped; ``class_`` and underscores are spelled as HTML spells them.

    Example:
        >>> tag("text", "<b>", class_="tick", x=1.25)
        Markup('<text class="tick" x="1.2">&lt;b&gt;</text>')
    """
    shown = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(f"{value:.1f}" if isinstance(value, float) else value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return Markup(f"<{name}{''.join(shown)}>{escape(content)}</{name}>")


def frame(label: str, parts: Sequence[Markup], height: int = HEIGHT) -> Markup:
    """An SVG that scales with the page and has a name for those who cannot see it."""
    return tag(
        "svg",
        Markup("").join(parts),
        class_="chart",
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label=label,
        preserveAspectRatio="xMinYMin meet",
    )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two ends.

    Example:
        >>> ticks(0.0, 1.0), ticks(-3.0, 14.0)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 5.0, 10.0])
    """
    span = max(high - low, 1e-12)
    step = 10 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (step * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [float(round(i * step, 12)) for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Axis:
    """A linear axis from numbers to places."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if high - low < 1e-9:
            low, high = low - 0.5, high + 0.5
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        """Where a number lies."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _vertical(axis: Axis, label: str, exponent: bool) -> list[Markup]:
    parts = []
    marks = ticks(axis.low, axis.high, 5)
    if exponent:
        marks = sorted({float(round(mark)) for mark in marks if axis.low <= round(mark) <= axis.high}) or marks
    for mark in marks:
        y = axis(mark)
        parts.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        text = _ten(mark) if exponent else escape(f"{mark:g}")
        parts.append(tag("text", text, class_="tick", x=LEFT - 6, y=y + 4, text_anchor="end"))
    middle = (axis.start + axis.end) / 2
    turned = f"rotate(-90 14 {middle:.1f})"
    return [*parts, tag("text", label, class_="label", x=14, y=middle, text_anchor="middle", transform=turned)]


def _ten(exponent: float) -> Markup:
    shown = f"{exponent:g}".replace("-", "\N{MINUS SIGN}")
    return Markup("10") + tag("tspan", shown, dy=-5, font_size=9)


def histogram(facts: dict[str, Any], label: str, across: str) -> Markup:
    """Counts of numbers given as powers of ten.

    Args:
        facts: ``edges`` and ``counts``.
        label: what the chart is called.
        across: what is counted.
    """
    edges, counts = facts["edges"], facts["counts"]
    x = Axis(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    y = Axis(0, max(counts), HEIGHT - BOTTOM, TOP)
    parts = []
    for mark in ticks(0, max(counts), 4):
        parts.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y(mark), y2=y(mark)))
        parts.append(tag("text", _short(mark), class_="tick", x=LEFT - 6, y=y(mark) + 4, text_anchor="end"))
    for i, count in enumerate(counts):
        if count:
            title = tag("title", f"10^{edges[i]:.2f} to 10^{edges[i + 1]:.2f}: {count:,}")
            left, wide = x(edges[i]), max(x(edges[i + 1]) - x(edges[i]) - 1, 1.0)
            high = max(y.start - y(count), 1.0)
            parts.append(tag("rect", title, class_="bar", x=left, y=y.start - high, width=wide, height=high))
    marks = ticks(edges[0], edges[-1], 8)
    whole = [mark for mark in marks if mark == round(mark)]
    for mark in whole if len(whole) > 1 else marks:
        parts.append(tag("text", _ten(mark), class_="tick", x=x(mark), y=HEIGHT - BOTTOM + 16, text_anchor="middle"))
    parts.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=y.start, y2=y.start))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", across, class_="label", x=middle, y=HEIGHT - 6, text_anchor="middle"))
    return frame(label, parts)


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def depth(
    names: Sequence[str],
    values: Sequence[float | None],
    label: str,
    up: str,
    expected: Sequence[float | None] | None = None,
    across: str = "layers in order of execution",
) -> Markup:
    """Positive numbers layer by layer, on a logarithmic axis; what theory expects as small strokes.

    Args:
        names: the layers, in order.
        values: one number per layer; what is missing or not positive leaves a gap.
        label: what the chart is called.
        up: what is shown.
        expected: numbers to set beside them.
        across: what runs along the axis.
    """
    shown = [(i, math.log10(v)) for i, v in enumerate(values) if v is not None and v > 0 and math.isfinite(v)]
    theory = [(i, math.log10(v)) for i, v in enumerate(expected or ()) if v is not None and v > 0 and math.isfinite(v)]
    every = [log for _, log in (*shown, *theory)]
    if not every:
        return frame(label, [tag("text", "nothing larger than 0", class_="tick", x=LEFT, y=40)], 60)
    x = Axis(-0.5, len(names) - 0.5, LEFT, WIDTH - RIGHT)
    y = Axis(math.floor(min(every)), max(math.ceil(max(every)), math.floor(min(every)) + 1), HEIGHT - BOTTOM, TOP)
    parts = _vertical(y, up, True)
    wide = max(min((WIDTH - LEFT - RIGHT) / max(len(names), 1) * 0.4, 9.0), 1.5)
    for i, log in theory:
        parts.append(tag("line", class_="theory", x1=x(i) - wide, x2=x(i) + wide, y1=y(log), y2=y(log)))
    line = " ".join(f"{'M' if n == 0 else 'L'}{x(i):.1f} {y(log):.1f}" for n, (i, log) in enumerate(shown))
    if line:
        parts.append(tag("path", class_="line", d=line))
    for i, log in shown:
        title = tag("title", f"{names[i]}: {number(10**log)}")
        parts.append(tag("circle", title, class_="dot", cx=x(i), cy=y(log), r=min(3.5, wide + 1)))
    return frame(label, [*parts, *_ends(names, x, across)])


def _ends(names: Sequence[str], x: Axis, across: str) -> list[Markup]:
    """The first and the last name below an axis, and what runs along it."""
    y = HEIGHT - BOTTOM + 16
    parts = [tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM)]
    for i, anchor in ((0, "start"), (len(names) - 1, "end")):
        if i or anchor == "start":
            parts.append(tag("text", _clip(names[i], 40), class_="tick", x=x(i), y=y, text_anchor=anchor))
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, tag("text", across, class_="label", x=middle, y=HEIGHT - 6, text_anchor="middle")]


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else "\N{HORIZONTAL ELLIPSIS}" + text[-most + 1 :]


def cosines(nodes: Sequence[dict[str, Any]], label: str) -> Markup:
    """Cosines of each node of a chain: mean as a bar from zero, 5 to 95 % of samples as a stroke."""
    known = [
        value
        for node in nodes
        for value in (node["cosine_q05"], node["cosine_q95"], node["cosine_mean"])
        if value is not None
    ]
    reach = max([0.02, *map(abs, known)]) * 1.08
    x = Axis(-0.5, len(nodes) - 0.5, LEFT, WIDTH - RIGHT)
    y = Axis(-reach, reach, HEIGHT - BOTTOM, TOP)
    wide = min((WIDTH - LEFT - RIGHT) / len(nodes) * 0.6, 26.0)
    parts = _vertical(y, "cosine with descent", False)
    for i, node in enumerate(nodes):
        mean = node["cosine_mean"]
        if mean is None:
            continue
        title = tag(
            "title",
            f"{node['name']}: {mean:+.4f} (5 % {number(node['cosine_q05'])}, 95 % {number(node['cosine_q95'])}), "
            f"|z|/|x| {number(node['direction_over_stream'])}",
        )
        high = max(abs(y(mean) - y(0)), 0.5)
        parts.append(
            tag(
                "rect",
                title,
                class_="bar" if mean > 0 else "bar up",
                x=x(i) - wide / 2,
                y=min(y(mean), y(0)),
                width=wide,
                height=high,
            )
        )
        if node["cosine_q05"] is not None and node["cosine_q95"] is not None:
            ends = {"y1": y(node["cosine_q05"]), "y2": y(node["cosine_q95"])}
            parts.append(tag("line", class_="whisker", x1=x(i), x2=x(i), **ends))
    parts.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=y(0), y2=y(0)))
    return frame(label, [*parts, *_ends([node["name"] for node in nodes], x, "nodes of the chain in order")])


def shares(parts_of: Sequence[tuple[str, int, str]], label: str) -> Markup:
    """Shares of a whole as one bar with a legend; ``(name, count, class)`` each."""
    total = sum(count for _, count, _ in parts_of)
    at, parts = 0.0, []
    wide = WIDTH - 2.0
    for name, count, kind in parts_of:
        if count and total:
            title = tag("title", f"{name}: {count:,} ({count / total:.1%})")
            size = count / total * wide
            parts.append(tag("rect", title, class_=f"share {kind}", x=1 + at, y=6, width=max(size, 1.0), height=30))
            at += size
    x, y = 4.0, 58
    for name, count, kind in parts_of:
        text = f"{name} {count:,}"
        if x + 30 + 7 * len(text) > WIDTH:
            x, y = 4.0, y + 20
        parts.append(tag("rect", class_=f"share {kind}", x=x, y=y - 10, width=12, height=12))
        parts.append(tag("text", text, class_="tick left", x=x + 17, y=y))
        x += 34 + 6.4 * len(text)
    return frame(label, parts, y + 12)
