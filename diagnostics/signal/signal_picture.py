"""The picture of signal by depth."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ..chain.plots import SMALLEST, WIDTH
from ..shared.tables import Table
from ..shared.wording import shortened
from .signal import LayerSignal

BLUE, ORANGE = "#0072B2", "#E69F00"


def draw_signal(table: Table[LayerSignal]) -> Figure:
    """Draw variance of activations, gain of every layer, and gain from the output,
    with one row for each layer.

    Args:
        table: from :func:`pathspace.diagnostics.signal.signal.signal`.

    Returns:
        A figure of three panels on logarithmic axes.
    """
    figure = Figure(figsize=(WIDTH, 1.8 + 0.19 * len(table)), layout="constrained")
    variance, gain, back = panels = figure.subplots(1, 3, sharey=True)
    depth = np.arange(len(table))

    def points(axes: Axes, values: list[float | None], colour: str, label: str, style: str) -> None:
        kept = [(v, d) for d, v in zip(depth, values, strict=True) if v is not None and v > 0]
        if kept:
            axes.plot(
                *zip(*kept, strict=True),
                style,
                color=colour,
                markersize=4,
                linewidth=1,
                label=label,
            )

    points(variance, [row.variance for row in table], BLUE, "measured", "o-")
    points(gain, [row.vjp_gain.value if row.vjp_gain else None for row in table], BLUE, "", "o")
    points(gain, [row.expected_gain for row in table], ORANGE, "theory", "x")
    points(
        back, [row.output_gain.value if row.output_gain else None for row in table], BLUE, "", "o-"
    )
    titles = ("variance of\nactivations", "VJP gain\nof the layer", "gain from\nthe output back")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=SMALLEST)
        axes.set_xscale("log")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.tick_params(labelsize=SMALLEST)
        axes.xaxis.set_major_locator(LogLocator(numticks=3))
        axes.xaxis.set_minor_locator(NullLocator())
    variance.set_yticks(depth, [shortened(row.layer) for row in table], fontsize=SMALLEST)
    variance.set_ylim(len(table) - 0.4, -0.6)
    figure.legend(frameon=False, fontsize=SMALLEST, loc="outside lower center", ncols=2)
    return figure
