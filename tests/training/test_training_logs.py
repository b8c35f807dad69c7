"""Metrics of a run as CSV, as JSON lines, for Fabric's loggers and for TensorBoard:
the same numbers everywhere.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning_fabric import Fabric
from lightning_fabric.loggers import CSVLogger
from training_command import call, flat, lines, table

from pathspace.training.experiments.tasks import load_task
from pathspace.training.history import EpochRecord, History
from pathspace.training.recipe import Recipe, prepare
from pathspace.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_core")


def test_csv_json_lines_and_loggers_agree(tmp_path: Path) -> None:
    task = load_task("digits-rows", hidden=4)
    fabric = Fabric(
        accelerator="cpu", devices=1, loggers=CSVLogger(tmp_path, name="logged", version="0")
    )
    model, optimizer = prepare(task, Recipe("sgd"))
    history = Trainer(
        task, model, optimizer, epochs=3, batch_size=300, folder=tmp_path / "run", fabric=fabric
    ).fit()
    fabric.logger.finalize("success")
    rows, objects, logged = (
        table(tmp_path / "run/metrics.csv"),
        lines(tmp_path / "run/metrics.jsonl"),
        table(tmp_path / "logged/0/metrics.csv"),
    )
    assert len(rows) == len(objects) == len(logged) == 3
    for record, row, found, other in zip(history.records, rows, objects, logged, strict=True):
        assert list(row) == list(found)
        assert (
            found["valid_error"]
            == record.valid_metric
            == float(row["valid_error"])
            == float(other["valid_error"])
        )
        assert (
            found["train_loss"]
            == record.train_loss
            == float(row["train_loss"])
            == float(other["train_loss"])
        )
        assert found["step"] == record.step == int(row["step"]) == int(other["step"])


def test_json_lines_know_no_nan(tmp_path: Path) -> None:
    history = History((EpochRecord(1, 5, math.inf, math.nan, math.nan, 0.5),))
    history.write_jsonl(tmp_path / "metrics.jsonl", "error")
    history.write_csv(tmp_path / "metrics.csv", "error")
    (found,), (row,) = lines(tmp_path / "metrics.jsonl"), table(tmp_path / "metrics.csv")
    assert found["train_loss"] is None and found["status"] == "diverged" and found["seconds"] == 0.5
    assert (row["train_loss"], row["valid_error"]) == ("inf", "nan")


def test_tensorboard_is_written_or_asked_for_in_one_sentence(tmp_path: Path) -> None:
    words = [
        "train",
        "digits-rows",
        "--hidden",
        4,
        "--batch-size",
        400,
        "--out",
        tmp_path,
        "--tensorboard",
    ]
    result = call(*words, "--epochs", 2)
    if not find_spec("tensorboard"):
        assert result.exit_code == 2 and list(tmp_path.iterdir()) == []
        sentence = (
            "Error: TensorBoard is not installed; run pip install tensorboard, or do not pass"
            " --tensorboard."
        )
        assert flat(result.stderr) == sentence
        return
    assert result.exit_code == 0, result.output
    assert call(*words, "--epochs", 4, "--resume").exit_code == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in ("train_loss", "valid_error"):
        scalars = [(event.step, event.value) for event in events.Scalars(name)]
        wanted = [(row["step"], row[name]) for row in lines(tmp_path / "metrics.jsonl")]
        assert [step for step, _ in scalars] == [step for step, _ in wanted] == [3, 6, 9, 12]
        assert [value for _, value in scalars] == pytest.approx(
            [value for _, value in wanted], rel=1e-6
        )
