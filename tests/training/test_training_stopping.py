"""Early stopping: where a run ends, which weights it leaves, and that an
interrupt changes neither.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_command import call, flat, stop_at, weights

from pathspace.errors import InputError
from pathspace.training.experiments.tasks import load_task
from pathspace.training.history import EpochRecord, History, best_record, exhausted
from pathspace.training.recipe import Recipe, prepare
from pathspace.training.task import Task
from pathspace.training.trainer import Tick, Trainer

pytestmark = pytest.mark.usefixtures("one_core")


def history(*metrics: float) -> History:
    return History(
        tuple(EpochRecord(i + 1, i, 1.0, 1.0, metric, 0.0) for i, metric in enumerate(metrics))
    )


@pytest.mark.parametrize(
    ("metrics", "patience", "best", "stops"),
    [
        ((), 1, None, False),
        ((0.5,), 1, 1, False),
        ((0.5, 0.5), 1, 1, True),
        ((0.5, 0.4, 0.6, 0.4), 2, 2, True),
        ((0.5, 0.4, 0.6, 0.3), 2, 4, False),
        ((0.5, float("nan"), 0.6), 2, 1, True),
        ((0.5, 0.6, 0.7, 0.8), None, 1, False),
    ],
)
def test_patience_runs_out(
    metrics: tuple[float, ...], patience: int | None, best: int | None, stops: bool
) -> None:
    record = best_record(history(*metrics))
    assert (record.epoch if record else None) == best and exhausted(
        history(*metrics), patience
    ) is stops


class Wandering:
    """A task whose validation metric falls and rises again: epoch by epoch
    0.5, 0.4, 0.3, 0.6, 0.7, ...
    """

    values = (0.5, 0.4, 0.3, 0.6, 0.7, 0.8, 0.9)

    def __init__(self, done: int = 0) -> None:
        self.done = done
        whole = load_task("digits-rows", hidden=4)
        self.task = replace(whole, metric=self.metric, valid=whole.valid)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.done += 1
        return torch.tensor(self.values[self.done - 1], dtype=torch.float64)


def make(task: Task, folder: Path | None, **options: object) -> Trainer:
    model, optimizer = prepare(task, Recipe("gmomentum"))
    return Trainer(task, model, optimizer, epochs=7, batch_size=200, folder=folder, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", [False, True])
def test_the_best_weights_come_back(tmp_path: Path, written: bool) -> None:
    third: list[Tensor] = []

    def watch(tick: Tick) -> None:
        if tick.step == 18:
            third.append(weights(trainer.model))

    trainer = make(Wandering().task, tmp_path if written else None, patience=2, watch=watch)
    found = trainer.fit()
    assert [record.epoch for record in found.records] == [1, 2, 3, 4, 5]
    assert torch.equal(weights(trainer.model), third[0])
    record = trainer.record_of_weights(found)
    assert record is not None and record.epoch == 3
    if written:
        best = torch.load(tmp_path / "best.pt", weights_only=True)
        assert (best["epoch"], best["metric"]) == (3, 0.3)
        other, _ = prepare(trainer.task, Recipe("sgd"))
        other.load_state_dict(best["model"])
        assert torch.equal(weights(other), third[0])
        # The checkpoint goes on from the last epoch all the same.
        assert len(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["records"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("stop", [8, 15, 19, 27])
def test_interrupted_runs_stop_at_the_same_epoch(tmp_path: Path, stop: int) -> None:
    whole = make(Wandering().task, None, patience=2)
    expected = whole.fit()
    with pytest.raises(KeyboardInterrupt):
        make(Wandering().task, tmp_path, patience=2, watch=stop_at(stop), checkpoint_every=4).fit()
    done = len(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["records"])
    rest = make(Wandering(done).task, tmp_path, patience=2, checkpoint_every=4)
    assert [r.epoch for r in rest.fit(resume=True).records] == [r.epoch for r in expected.records]
    assert torch.equal(weights(rest.model), weights(whole.model))
    # Once stopped, it stays so; with more patience it goes on from its last epoch.
    again = make(Wandering(5).task, tmp_path, patience=2)
    assert len(again.fit(resume=True).records) == 5 and torch.equal(
        weights(again.model), weights(whole.model)
    )
    further = make(Wandering(5).task, tmp_path, patience=3)
    assert len(further.fit(resume=True).records) == 6 and torch.equal(
        weights(further.model), weights(whole.model)
    )


def test_patience_cannot_begin_in_the_middle(tmp_path: Path) -> None:
    make(Wandering().task, tmp_path).fit()
    with pytest.raises(
        InputError, match="early_stopping = None, this run asks for early_stopping = True"
    ):
        make(Wandering().task, tmp_path, patience=2).fit(resume=True)


def test_command_stops_early_and_says_so(tmp_path: Path) -> None:
    words = [
        "train",
        "digits-rows",
        "--hidden",
        4,
        "--lr",
        1e-9,
        "--patience",
        2,
        "--epochs",
        9,
        "--batch-size",
        400,
    ]
    done = call(*words, "--out", tmp_path / "run", "--json", tmp_path / "result.json")
    assert done.exit_code == 0 and "those of epoch 1, the best; none better came in time" in flat(
        done.output
    )
    record = json.loads((tmp_path / "result.json").read_text())
    assert (record["epochs_done"], record["epoch_of_weights"]) == (3, 1)
    # A run that was stopped has come to its end: nothing is in the way of a new one.
    assert call(*words, "--out", tmp_path / "run").exit_code == 0
