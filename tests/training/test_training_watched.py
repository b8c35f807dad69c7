"""``pathspace train --diagnostics``: the run is watched, and is the same run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from training_command import call

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("task", "optimizer", "tau"), [("digits-rows", "gsgd", 0.0), ("digits-images", "sgd", 1e-3)]
)
def test_a_watched_run_is_the_same_run(
    task: str, optimizer: str, tau: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ["train", task, "--hidden", 4, "--batch-size", 300, "--optimizer", optimizer]
    words += ["--tau", tau, "--epochs", 2]
    watched, plain, result = (tmp_path / name for name in ("watched", "plain", "result.json"))
    done = call(*words, "--out", watched, "--diagnostics", 2, "--json", result)
    assert done.exit_code == 0 and call(*words, "--out", plain).exit_code == 0, done.output
    assert "rows 5, seconds" in done.output
    assert json.loads(result.read_text())["diagnostics"]["rows"] == 5
    with open(watched / "diagnostics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["step"]) for row in rows] == [1, 2, 4, 6, 8]
    # residual branches have an efficiency, and every free scale a conserved quantity
    assert ("efficiency" in rows[-1]) == (task == "digits-images")
    assert float(rows[0]["conserved_drift"]) == 0.0 < float(rows[-1]["conserved_drift"])
    assert (watched / "diagnostics.html").is_file()
    one, two = (
        torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (watched, plain)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    # a resumed run begins files of its own
    kept = (watched / "diagnostics.csv").read_bytes()
    again = ("--out", watched, "--diagnostics", 2, "--resume", "--epochs", 3)
    assert call(*words, *again).exit_code == 0
    assert (watched / "diagnostics.csv").read_bytes() == kept
    assert (watched / "diagnostics-resumed.csv").is_file()
