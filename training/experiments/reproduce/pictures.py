"""Parts of pictures that experiments share: curves of arms, mean over seeds with its range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, told apart by colour-blind readers, too; the markers help in grey print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@contextmanager
def panels(
    count: int, width: float = 4.2, height: float = 3.4
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """Yield a figure and its panels in a row, in the house's style."""
    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(width * count, height), dpi=110, layout="constrained")
        axes = list(np.atleast_1d(figure.subplots(1, count)).ravel())
        for each in axes:
            each.grid(alpha=0.25, linewidth=0.6)
        yield figure, axes


def look(place: int) -> dict[str, Any]:
    """Return colour and marker of the arm at this place."""
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


def draw_curves(
    axes: Axes,
    place: int,
    label: str,
    lines: Sequence[Sequence[float | None]],
    first: int = 1,
    factor: float = 1.0,
) -> None:
    """Draw the mean over seeds as a line, and their range as a band."""
    shortest = min((len(line) for line in lines), default=0)
    if not shortest:
        return
    # (None becomes NaN)
    values = factor * np.array([line[:shortest] for line in lines], dtype=float)
    epochs = np.arange(first, first + shortest)
    style = look(place)
    axes.plot(
        epochs,
        values.mean(0),
        label=label,
        markevery=max(1, shortest // 8),
        markersize=4,
        linewidth=1.5,
        **style,
    )
    axes.fill_between(
        epochs, values.min(0), values.max(0), color=style["color"], alpha=0.15, linewidth=0
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def draw_arms(
    axes: Axes, arms: Sequence[dict[str, Any]], key: str, factor: float = 1.0, **labels: Any
) -> None:
    """Draw one curve for each arm of a record."""
    for place, arm in enumerate(arms):
        draw_curves(axes, place, arm["label"], arm[key], int(key != "efficiencies"), factor)
    axes.set(xlabel="epoch", **labels)


def legend(figure: Figure, axes: Axes, columns: int = 4) -> None:
    """Put one legend below all panels."""
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False
    )
