"""Two reports on one page, for example before and after training, or two initialisations."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pathspace.errors import expect_arguments
from pathspace.files.writing import replacing
from pathspace.shown import Shown

from ..shared import charts
from ..shared.pages import render
from ..shared.wording import number_text, power_of_ten
from .page import Report

Facts = dict[str, Any]
# part, how to read its value, title
FIGURES: tuple[tuple[str, Callable[[Facts], Any], str], ...] = (
    ("model", lambda f: f["path_space"], "weights in path space"),
    ("model", lambda f: f["units"], "units"),
    ("model", lambda f: f["dimension"], "dimension"),
    ("certificate", lambda f: f["holds"], "certificate holds"),
    ("values", lambda f: power_of_ten(f["values"]["median"]), "median path value"),
    ("values", lambda f: power_of_ten(f["values"]["largest"]), "largest path value"),
    (
        "values",
        lambda f: power_of_ten(f["multipliers"]["largest"]),
        "largest multiplier of the learning rate",
    ),
    ("chain", lambda f: f["efficiency"], "efficiency of the chain"),
    ("chain", lambda f: f["share_all_cosines_positive"], "samples with every cosine positive"),
    ("gradients", lambda f: f["imbalance"], "largest over smallest gradient"),
    ("degeneracy", lambda f: f["deficit"], "directions that do nothing"),
    ("degeneracy", lambda f: f["dead"], "of them dead"),
    (
        "alarms",
        lambda f: ", ".join(a["kind"] for a in f["alarms"] if not a["because"]) or "none",
        "alarms",
    ),
)
# part, its rows, name and value in a row, title, what is shown
CURVES = (
    ("signal", "rows", "layer", "variance", "Variance of activations by depth", "variance"),
    ("signal", "rows", "layer", "vjp_gain", "Gain of gradients by depth", "VJP gain"),
    ("gradients", "rows", "parameter", "rms", "Gradients by parameter tensor", "gradient RMS"),
    (
        "chain",
        "nodes",
        "name",
        "direction_over_stream",
        "Size of each branch beside its stream",
        "|z| / |x|",
    ),
)


@dataclass(frozen=True)
class Versus(Shown):
    """Two reports on one page.

    Attributes:
        first: one report.
        second: the other one.
        rows: title and both values of every figure that is in both reports.
        sentences: the largest differences, computed from the numbers.
        html: the page, self-contained.
    """

    first: Report
    second: Report
    rows: list[tuple[str, Any, Any]]
    sentences: list[str]
    html: str = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page; an existing file is replaced completely or not at all.

        Args:
            path: the file.
        """
        with replacing(path) as temporary:
            temporary.write_text(self.html, encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Both reports, the figures and the sentences as plain values."""
        figures = [{"figure": title, "first": a, "second": b} for title, a, b in self.rows]
        both = {"first": self.first.to_dict(), "second": self.second.to_dict()}
        return {"figures": figures, "sentences": self.sentences, **both}


def versus(first: Report, second: Report, names: tuple[str, str] = ("A", "B")) -> Versus:
    """Compare two reports: figures in a table, curves in common charts, and the
    largest differences in words.

    Args:
        first: a report, say of a model before training.
        second: another one, say after it; of any model.
        names: their names on the page.

    Returns:
        The comparison; ``save(path)`` writes the page.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pathspace.diagnostics import report
        >>> model, x = nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 2)), torch.randn(8, 2)
        >>> before = report(model, x)
        >>> _ = torch.nn.init.constant_(model[2].weight, 30.0)
        >>> versus(before, report(model, x)).sentences[0].split(":")[0]
        'The variance of activations differs most at 2'
    """
    for each in (first, second):
        expect_arguments("versus", report=each)
    a, b = first.facts, second.facts
    rows = []
    for part, read, title in FIGURES:
        if not (a[part].get("absent") or b[part].get("absent")):
            rows.append((title, *(_safe(read, facts[part]) for facts in (a, b))))
    told, figures = [], []
    for part, key, label, value, title, up in CURVES:
        curves = [{row[label]: row[value] for row in facts[part].get(key, [])} for facts in (a, b)]
        if not all(curves):
            continue
        layers = list(dict.fromkeys(name for curve in curves for name in curve))
        series = {
            name: [curve.get(layer) for layer in layers]
            for name, curve in zip(names, curves, strict=True)
        }
        figures.append((title, charts.both(layers, series, title, up)))
        told += _most(
            layers, list(series.values()), up if up != "variance" else "variance of activations"
        )
    for part in ("values", "multipliers"):
        tallies: list[Facts] = [facts["values"].get(part, {"count": 0}) for facts in (a, b)]
        if all(tally["count"] for tally in tallies):
            title = "Path values" if part == "values" else "Multipliers of the learning rate"
            figures.append(
                (title, charts.histograms(dict(zip(names, tallies, strict=True)), title, "size"))
            )
    heads = [f"{name}: {facts['model']['name']}" for name, facts in zip(names, (a, b), strict=True)]
    both = [
        (part, first.sentences[part], second.sentences[part])
        for part in first.sentences
        if part != "model"
    ]
    html = render(
        "versus.html.j2", names=names, heads=heads, rows=rows, told=told, figures=figures, both=both
    )
    return Versus(first, second, rows, told, html)


def _safe(read: Callable[[Facts], Any], facts: Facts) -> Any:
    """A figure, or ``None`` if the part has none."""
    try:
        value = read(facts)
    except (KeyError, TypeError, OverflowError):
        return None
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _most(layers: Sequence[str], series: Sequence[Sequence[float | None]], what: str) -> list[str]:
    """The place of the largest difference between two curves of positive numbers."""
    pairs = [
        (x, p, q) for x, p, q in zip(layers, *series, strict=True) if p and q and p > 0 and q > 0
    ]
    if not pairs:
        return []
    layer, p, q = max(pairs, key=lambda each: abs(math.log(each[2] / each[1])))
    factor = max(p / q, q / p)
    if factor < 1.1:
        return [f"The {what} is the same everywhere, to within 10 %."]
    verb = "more" if q > p else "less"
    return [
        f"The {what} differs most at {layer}: {number_text(p)} and {number_text(q)},"
        f" {number_text(factor, 2)} times {verb}."
    ]
