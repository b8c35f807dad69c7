"""Pictures of a chain: cosines by depth, quantiles over training, and the walk of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from pathspace.errors import InputError

from ..shared.wording import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .efficiency import ChainRecord
    from .walks import Walk

# width in inches and smallest font in points, which is 9 pixels high if the
# figure is 390 pixels wide
WIDTH, SMALLEST = 5.2, 9
_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
_BLUE, _ORANGE, _GREY = "#2a6f97", "#d1603d", "#8a8f98"


def cosines_by_depth(record: ChainRecord) -> Figure:
    """Quantiles of the cosines ``c_l`` over samples for each node from top to bottom, and
    relative sizes of directions.

    Args:
        record: an observed chain.

    Returns:
        A figure; ``figure.savefig(path)`` writes it.
    """
    count = len(record.names)
    figure = Figure(figsize=(WIDTH, 1.8 + 0.19 * count), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2.2, 1))
    at = np.arange(count)
    low, lower, middle, upper, high = record.quantiles(_LEVELS).numpy()
    left.axvline(0, color=_GREY, linewidth=1)
    left.hlines(at, low, high, color=_BLUE, alpha=0.35, linewidth=2, label="5-95 %")
    left.hlines(at, lower, upper, color=_BLUE, linewidth=5, label="25-75 % of samples")
    left.scatter(middle, at, color="white", edgecolor=_BLUE, zorder=3, s=28, label="median")
    left.set_xlabel("cosine of direction\nand descent")
    efficiency, share = record.mean_efficiency, record.convex_share
    figure.suptitle(
        f"efficiency {efficiency:+.4f}\nevery cosine positive for {share:.0%} of {record.samples}"
        " samples",
        fontsize=10,
    )
    figure.legend(frameon=False, fontsize=SMALLEST, ncols=3, loc="outside lower center")
    ratio = record.norms.nanmedian(1).values
    right.plot(ratio.numpy(), at, color=_ORANGE, marker="o", markersize=4)
    if float(ratio.nan_to_num(nan=1.0).amax()) > 10 * float(ratio.nan_to_num(nan=1.0).amin()) > 0:
        right.set_xscale("log")
    else:
        right.set_xlim(left=0)
    right.set_xlabel("median |z| / |x|")
    left.set_yticks(at, [shortened(name) for name in record.names], fontsize=SMALLEST)
    left.set_ylim(count - 0.4, -0.6)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def efficiency_over_training(records: Sequence[ChainRecord]) -> Figure:
    """Quantiles of ``eps'`` over samples, and the share of samples with every
    cosine positive, step by step.

    Args:
        records: the records of a :class:`pathspace.diagnostics.chain.efficiency.Watch`.

    Returns:
        A figure.

    Raises:
        InputError: there are no records.
    """
    if not records:
        raise InputError("There are no records to draw: watch at least one training step.")
    steps = np.arange(1, len(records) + 1)
    low, lower, middle, upper, high = np.array(
        [r.efficiency_quantiles(_LEVELS).tolist() for r in records]
    ).T
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    top.axhline(0, color=_GREY, linewidth=1)
    top.fill_between(
        steps, low, high, color=_BLUE, alpha=0.15, linewidth=0, label="5-95 % of samples"
    )
    top.fill_between(steps, lower, upper, color=_BLUE, alpha=0.35, linewidth=0, label="25-75 %")
    top.plot(steps, middle, color=_BLUE, label="median")
    top.set_ylabel("efficiency of the chain")
    top.legend(frameon=False, fontsize=SMALLEST)
    bottom.plot(steps, [100 * r.convex_share for r in records], color=_ORANGE)
    bottom.set_ylabel("samples with every\ncosine positive (%)")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def walk_picture(walks: Sequence[Walk]) -> Figure:
    """The walk of one sample through the states of the chain, with one plane for each
    run of states of one shape.

    Args:
        walks: from :func:`pathspace.diagnostics.chain.walks.walks`.

    Returns:
        A figure with one panel for each of them.
    """
    rows = -(-len(walks) // 2)
    columns = min(2, len(walks))
    height = 0.4 + (4.2 if columns == 1 else 2.9) * rows
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns)).flatten()
    for axes, each in zip(panels, walks, strict=False):
        _draw_walk(axes, each)
    for axes in panels[len(walks) :]:
        axes.set_axis_off()
    nodes = sum(len(each.names) for each in walks)
    cut = f", cut into {len(walks)} where the shape of the states changes" if len(walks) > 1 else ""
    figure.suptitle(f"walk of one sample through {nodes} nodes{cut}", fontsize=10, wrap=True)
    figure.supxlabel("first principal direction", fontsize=SMALLEST)
    figure.supylabel("second principal direction", fontsize=SMALLEST)
    return figure


def _draw_walk(axes: Axes, walk: Walk) -> None:
    x, y = walk.points.cpu().numpy().T
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(x)))
    axes.quiver(
        x[:-1],
        y[:-1],
        np.diff(x),
        np.diff(y),
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.01,
        color=colours[:-1],
    )
    axes.scatter(x, y, color=colours, s=18, zorder=3)
    box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    close = abs(x[0] - x[-1]) < 0.25 * np.ptp(x)
    for label, i, other in (("start", 0, -1), ("end", -1, 0)):
        # away from the middle of the walk; of ends that are close, one label above and one below
        above = (y[i], i) > (y[other], other) if close else y[i] >= y.mean()
        side = 12 if above else -18
        axes.annotate(
            label,
            (x[i], y[i]),
            textcoords="offset points",
            xytext=(0, side),
            fontsize=SMALLEST,
            ha="center",
            bbox=box,
        )
    first, last = shortened(walk.names[0]), shortened(walk.names[-1])
    several = (
        f"{len(walk.names)} nodes, {first} to\n{last}"
        if len(walk.names) > 1
        else f"1 node, {first}\n"
    )
    turns = f"; {walk.folds:.0%} of steps turn back" if len(walk.names) > 1 else ""
    axes.set_title(several + turns, fontsize=SMALLEST)
    axes.tick_params(labelsize=SMALLEST)
    axes.locator_params(nbins=4)
    axes.margins(0.25)
    axes.spines[["top", "right"]].set_visible(False)


__all__ = [
    "SMALLEST",
    "WIDTH",
    "cosines_by_depth",
    "efficiency_over_training",
    "walk_picture",
]
