"""Learning curves of a comparison."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from pathspace.files import replacing
from pathspace.training.experiments.experiment import Comparison, Run
from pathspace.training.history import EpochRecord

# Okabe and Ito's colours, told apart by colour-blind readers, too; the markers help in grey print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P")


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw training loss and validation metric against epochs, and what each learning rate led to.

    Thick lines are means over seeds at the chosen learning rate, thin lines are single seeds. In the third
    panel dots are runs, crosses at the top are runs that failed, lines join means where no seed failed, and
    rings mark the learning rates that were chosen.

    Args:
        comparison: the runs and the chosen learning rates.

    Returns:
        A figure of three panels that share one legend.
    """
    task = comparison.plan.task
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11.5, 4.2), dpi=150, layout="constrained")
        loss, metric, rates = figure.subplots(1, 3)
        for place, verdict in enumerate(comparison.verdicts):
            look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
            label = f"{verdict.arm.label}, lr {verdict.lr:g}"
            chosen = comparison.chosen(verdict)
            _curves(loss, chosen, lambda record: record.train_loss, label, look)
            _curves(metric, chosen, lambda record: record.valid_metric, label, look)
            # Arms side by side, so that equal values do not hide each other.
            shift = 1.06 ** (place - (len(comparison.verdicts) - 1) / 2)
            _rates(rates, [run for run in comparison.runs if run.arm == verdict.arm], verdict.lr, shift, look)
        loss.set(title="training loss", xlabel="epoch")
        metric.set(title=f"validation {task.metric_name}", xlabel="epoch")
        rates.set(title=f"validation {task.metric_name} at the end", xlabel="learning rate", xscale="log")
        rates.set_xticks(comparison.plan.rates, [f"{rate:g}" for rate in comparison.plan.rates])
        rates.xaxis.set_minor_locator(NullLocator())
        percent = task.metric_format.endswith("%")
        for axes in (loss, metric, rates):
            axes.grid(alpha=0.25, linewidth=0.6)
            if not np.isfinite(axes.dataLim.minposy):
                # No positive value, because every run failed: nothing to scale.
                continue
            axes.set_yscale("log")
            if axes is not loss:
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(
                    FuncFormatter(lambda value, _: f"{100 * value:g}%" if percent else f"{value:g}")
                )
                axes.yaxis.set_minor_locator(NullLocator())
        figure.legend(*loss.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        plan = comparison.plan
        figure.suptitle(
            f"{task.name}: {plan.epochs} epoch{'s' * (plan.epochs != 1)}, batches of {plan.batch_size}, "
            f"{len(plan.seeds)} seed{'s' * (len(plan.seeds) != 1)} "
            "(thick: mean, thin: each seed; cross: failed run; ring: chosen lr)",
            fontsize=11,
        )
    return figure


def save_figure(figure: Figure, stem: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write a figure as ``<stem>.png`` and ``<stem>.svg``; the same figure gives the same bytes.

    Args:
        figure: what to write.
        stem: path without a suffix.

    Returns:
        The two files.

    Raises:
        InputError: a file cannot be written.
    """
    png, svg = Path(f"{os.fspath(stem)}.png"), Path(f"{os.fspath(stem)}.svg")
    with matplotlib.rc_context({"svg.hashsalt": "pathspace"}):
        for path, metadata in ((png, {"Software": None}), (svg, {"Date": None})):
            with replacing(path) as temporary:
                figure.savefig(temporary, metadata=metadata)
    return png, svg


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG; the same figure gives the same bytes.

    Args:
        figure: what to write.
        path: the file.

    Raises:
        InputError: the file cannot be written.
    """
    with replacing(path) as temporary:
        figure.savefig(temporary, metadata={"Software": None})


def _curves(
    axes: Axes, runs: Sequence[Run], read: Callable[[EpochRecord], float], label: str, look: dict[str, str]
) -> None:
    lines = [np.array([read(record) for record in run.history.records]) for run in runs]
    for line in lines:
        axes.plot(np.arange(1, len(line) + 1), line, color=look["color"], linewidth=0.6, alpha=0.45)
    shortest = min((len(line) for line in lines), default=0)
    # After a seed has diverged there is no mean over all seeds to draw.
    mean = np.mean([line[:shortest] for line in lines], axis=0) if shortest else np.zeros(0)
    epochs = np.arange(1, len(mean) + 1)
    every = max(1, len(mean) // 8)
    axes.plot(epochs, mean, linewidth=1.8, markersize=5, markevery=every, label=label, **look)  # type: ignore[arg-type]


def _rates(axes: Axes, runs: Sequence[Run], chosen: float, shift: float, look: dict[str, str]) -> None:
    rates = sorted({run.lr for run in runs})
    means = []
    for rate in rates:
        here = [run for run in runs if run.lr == rate]
        values = [run.history.last.valid_metric for run in here if run.history.last and not run.failed]
        failed = len(here) - len(values)
        axes.plot([rate * shift] * len(values), values, ".", color=look["color"], markersize=4, alpha=0.5)
        for height in range(failed):
            # In units of the panel's height: a failure has no value worth an axis.
            axes.plot(
                rate * shift,
                0.97 - 0.045 * height,
                "x",
                color=look["color"],
                markersize=5,
                transform=axes.get_xaxis_transform(),
            )
        means.append(np.nan if failed else float(np.mean(values)))
    axes.plot(np.array(rates) * shift, means, linewidth=1.5, markersize=5, **look)  # type: ignore[arg-type]
    ring = means[rates.index(chosen)]
    axes.plot(chosen * shift, ring, "o", color=look["color"], markersize=13, markerfacecolor="none")
