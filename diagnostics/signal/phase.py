"""Pictures: growth exponents over weight scales, signal by depth, spectra; saved as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from pathspace.errors import InputError

from ..chain.plots import SMALLEST, WIDTH
from ..shared.tables import Table
from ..shared.wording import shortened
from .criticality import CriticalPoint, ScalePoint
from .signal import LayerSignal
from .spectra import Spectrum

BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def draw_sweep(
    table: Table[ScalePoint],
    theory: Callable[[float], float] | None = None,
    critical: CriticalPoint | None = None,
) -> Figure:
    """Draw the exponent over the weight scale with 95 % intervals, with order and chaos shaded.

    Args:
        table: from :func:`pathspace.diagnostics.signal.criticality.sweep`, one bias scale.
        theory: theoretical exponent as a function of the scale.
        critical: drawn as a vertical line.

    Returns:
        The figure.
    """
    figure, axes = _figure(4.2)
    rows = sorted(table, key=lambda row: row.scale)
    scale = np.array([row.scale for row in rows])
    value = np.array([row.growth.value for row in rows])
    spread = np.array([[row.growth.value - row.low, row.high - row.growth.value] for row in rows]).T
    spread = np.where(np.isfinite(spread), spread, 0)
    axes.errorbar(
        scale,
        value,
        spread,
        fmt="o",
        color=BLUE,
        markersize=4,
        capsize=2,
        label="measured, 95 % interval",
    )
    if theory is not None:
        fine = np.linspace(scale.min(), scale.max(), 120)
        axes.plot(
            fine,
            [theory(s) for s in fine],
            color=ORANGE,
            linewidth=1.5,
            zorder=0,
            label="infinite width",
        )
    axes.axhline(0, color="black", linewidth=0.8)
    low, high = axes.get_ylim()
    axes.axhspan(min(low, 0), 0, color=GREEN, alpha=0.08, linewidth=0)
    axes.axhspan(0, max(high, 0), color=ORANGE, alpha=0.08, linewidth=0)
    axes.set_ylim(min(low, 0), max(high, 0))
    if critical is not None and critical.scale is not None:
        label = f"critical {critical.scale:.3f}" + (
            f" ± {critical.error:.3f}" if critical.error else ""
        )
        axes.axvline(critical.scale, color="black", linewidth=1, linestyle="--", label=label)
    for name, side in (("chaos", 9), ("order", -9)):
        axes.annotate(
            name,
            (0.02, 0),
            (0, side),
            axes.get_yaxis_transform(),
            "offset points",
            style="italic",
            color="0.35",
            va="center",
        )
    axes.set(xlabel="weight scale  σ  (variance σ² / fan-in)", ylabel="growth exponent λ per layer")
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_phase(
    table: Table[ScalePoint], boundary: Callable[[float], float] | None = None
) -> Figure:
    """Draw the exponent over weight and bias scale as colour, with the measured and
    the theoretical boundary.

    Args:
        table: from :func:`pathspace.diagnostics.signal.criticality.sweep` with several bias scales.
        boundary: critical weight scale as a function of the bias scale.

    Returns:
        The figure.

    Raises:
        InputError: the table is not a grid.
    """
    scales, biases = sorted({row.scale for row in table}), sorted({row.bias for row in table})
    found = {(row.bias, row.scale): row.growth.value for row in table}
    if len(found) != len(scales) * len(biases) or len(scales) < 2 or len(biases) < 2:
        raise InputError(
            f"draw_phase found {len(found)} points for {len(scales)} weight and {len(biases)} bias"
            " scales, expected a full grid of at least 2 x 2."
        )
    grid = np.array([[found[bias, scale] for scale in scales] for bias in biases])
    figure, axes = _figure(4.4)
    axes.grid(visible=False)
    limit = float(np.abs(grid[np.isfinite(grid)]).max(initial=1e-12))
    norm = TwoSlopeNorm(0, -limit, limit)
    mesh = axes.pcolormesh(scales, biases, grid, cmap="PuOr_r", norm=norm, shading="gouraud")
    figure.colorbar(mesh, ax=axes, label="growth exponent λ per layer")
    if grid.min() < 0 < grid.max():
        axes.contour(scales, biases, grid, levels=[0], colors="black", linewidths=1.5)
        axes.plot([], [], color="black", linewidth=1.5, label="measured λ = 0")
    if boundary is not None:
        fine = np.linspace(biases[0], biases[-1], 40)
        axes.plot(
            [boundary(b) for b in fine],
            fine,
            "--",
            color=BLUE,
            linewidth=1.5,
            label="infinite width",
        )
        axes.set_xlim(scales[0], scales[-1])
    axes.set(xlabel="weight scale σ_w", ylabel="bias scale σ_b")
    axes.legend(frameon=True, loc="upper left")
    return figure


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


def draw_spectrum(spectrum: Spectrum, label: str = "Lanczos quadrature") -> Figure:
    """Draw the density of singular values.

    Args:
        spectrum: from :func:`pathspace.diagnostics.signal.spectra.spectrum`.
        label: for the legend.

    Returns:
        The figure.
    """
    figure, axes = _figure(3.8)
    grid = np.linspace(0, 1.1 * max(spectrum.largest, 1e-12), 400)
    axes.fill_between(grid, spectrum.density(grid), color=BLUE, alpha=0.3, linewidth=0)
    axes.plot(grid, spectrum.density(grid), color=BLUE, label=label)
    axes.axvline(
        spectrum.largest, color=ORANGE, linestyle="--", label=f"largest {spectrum.largest:.3g}"
    )
    axes.set(xlabel="singular value", ylabel="density", ylim=(0, None), xlim=(0, grid[-1]))
    axes.legend(frameon=False)
    return figure
