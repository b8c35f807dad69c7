"""The demo, and intervals of a mean."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import pathspace as ps
import pathspace.training.experiments.demo as demo
from pathspace.training.experiments.intervals import t_interval


def test_intervals_are_students() -> None:
    # mean 2, standard deviation 1, t(0.975, 2) = 4.302653
    assert t_interval([1, 2, 3]).half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert math.isnan(t_interval([5.0]).half_width) and t_interval([5.0]).show(".1f") == "5.0"


@pytest.mark.slow
def test_demo_leaves_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODELS", demo.MODELS[1:])
    folder, console = tmp_path / "new" / "demo", Console(width=80, file=io.StringIO())
    assert demo.run_demo(folder, console=console, seeds=1)
    titles = [title for title, *_ in demo.MODELS]
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*")} == {
        *(f"masks/{title}.safetensors" for title in titles),
        *(f"certificates/{title}.json" for title in titles),
        "report.html",
    }
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "pathspace train digits-rows" in text and "fails" not in text
    assert text.count("all theorems that apply hold") == len(titles)


def test_all_rows_compute_the_same_and_one_gauge_is_for_rounding() -> None:
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    ps.rescale_(model, ps.trace(model, torch.randn(2, 8)), torch.randn(64))
    console = Console(width=120, file=io.StringIO())
    demo.rescale_and_round("net", (model, (torch.randn(256, 8),)), console)
    rows = [line.split() for line in console.file.getvalue().splitlines() if " dB" in line]  # type: ignore[attr-defined]
    sizes, changes, decibels = (
        [float(row[place].replace(",", "")) for row in rows] for place in (-6, -5, -4)
    )
    start, scrambled, balanced, chosen = range(4)
    assert len(rows) == 4 and max(changes) < 1e-4
    assert min(sizes) == sizes[balanced] and sizes[scrambled] > 2 * sizes[balanced]
    assert decibels[chosen] == max(decibels) and decibels[chosen] > decibels[start] + 3
