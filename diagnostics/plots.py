"""Pictures of a chain: cosines by depth, quantiles over training, and the walk of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from pathspace.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from pathspace.diagnostics.efficiency import ChainRecord

_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
_BLUE, _ORANGE, _GREY = "#2a6f97", "#d1603d", "#8a8f98"


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def cosines_by_depth(record: ChainRecord) -> Figure:
    """Bands of the cosines ``c_l`` over samples, node by node, above the sizes of the directions.

    Args:
        record: an observed chain.

    Returns:
        A figure; ``figure.savefig(path)`` writes it.
    """
    count = len(record.names)
    longest = max(map(len, record.names))
    figure = _figure(max(6.0, min(16.0, 0.32 * count + 2.5)), 5.2 + 0.045 * longest)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    at = np.arange(count)
    low, lower, middle, upper, high = record.quantiles(_LEVELS).numpy()
    top.axhline(0, color=_GREY, linewidth=1)
    top.vlines(at, low, high, color=_BLUE, alpha=0.35, linewidth=2, label="5-95 % of samples")
    top.vlines(at, lower, upper, color=_BLUE, linewidth=5, label="25-75 %")
    top.scatter(at, middle, color="white", edgecolor=_BLUE, zorder=3, s=28, label="median")
    top.set_ylabel("cosine of direction\nand descent")
    efficiency, share = record.mean_efficiency, record.convex_share
    top.set_title(
        f"efficiency {efficiency:+.4f}; every cosine positive for {share:.0%} of {record.samples} samples", fontsize=11
    )
    top.legend(frameon=False, fontsize=8, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.01))
    bottom.plot(at, record.norms.nanmedian(1).values.numpy(), color=_ORANGE, marker="o", markersize=4)
    ratio = record.norms.nanmedian(1).values
    if float(ratio.nan_to_num(nan=1.0).amax()) > 10 * float(ratio.nan_to_num(nan=1.0).amin()) > 0:
        bottom.set_yscale("log")
    else:
        bottom.set_ylim(bottom=0)
    bottom.set_ylabel("median |z| / |x|")
    bottom.set_xticks(at, record.names, rotation=90, fontsize=7 if count > 16 else 8)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def efficiency_over_training(records: Sequence[ChainRecord]) -> Figure:
    """Quantiles of ``eps'`` over samples, and the share of samples with every cosine positive, step by step.

    Args:
        records: what a :class:`pathspace.diagnostics.efficiency.Watch` collected.

    Returns:
        A figure.

    Raises:
        InputError: there are no records.
    """
    if not records:
        raise InputError("There are no records to draw: watch at least one training step.")
    steps = np.arange(1, len(records) + 1)
    low, lower, middle, upper, high = np.array([r.efficiency_quantiles(_LEVELS).tolist() for r in records]).T
    figure = _figure(7, 4.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    top.axhline(0, color=_GREY, linewidth=1)
    top.fill_between(steps, low, high, color=_BLUE, alpha=0.15, linewidth=0, label="5-95 % of samples")
    top.fill_between(steps, lower, upper, color=_BLUE, alpha=0.35, linewidth=0, label="25-75 %")
    top.plot(steps, middle, color=_BLUE, label="median")
    top.set_ylabel("efficiency of the chain")
    top.legend(frameon=False, fontsize=8)
    bottom.plot(steps, [100 * r.convex_share for r in records], color=_ORANGE)
    bottom.set_ylabel("samples with every\ncosine positive (%)")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def walk_picture(points: Tensor, folds: float) -> Figure:
    """The walk of one sample through the states of the chain, in the plane of its two principal directions.

    Args:
        points: from :func:`pathspace.diagnostics.lemmas.walk`.
        folds: share of consecutive steps that turn back.

    Returns:
        A figure.
    """
    x, y = points.cpu().numpy().T
    figure = _figure(5.2, 4.6)
    axes = figure.subplots()
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(x)))
    axes.quiver(
        x[:-1], y[:-1], np.diff(x), np.diff(y), angles="xy", scale_units="xy", scale=1, width=0.006, color=colours[:-1]
    )
    axes.scatter(x, y, color=colours, s=18, zorder=3)
    box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    for label, i in (("start", 0), ("end", -1)):
        # beside the point, away from the middle of the walk
        side = 14 if y[i] >= y.mean() else -20
        axes.annotate(
            label, (x[i], y[i]), textcoords="offset points", xytext=(0, side), fontsize=9, ha="center", bbox=box
        )
    axes.set_title(f"walk of one sample; {folds:.0%} of its steps turn back", fontsize=11)
    axes.set_xlabel("first principal direction")
    axes.set_ylabel("second principal direction")
    axes.margins(0.15)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


__all__ = ["cosines_by_depth", "efficiency_over_training", "walk_picture"]
