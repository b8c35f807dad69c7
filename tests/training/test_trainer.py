"""What the trainer promises: recorded runs' numbers, resuming bit for bit, the best epoch, logs."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import pathspace as ps
from pathspace.errors import InputError
from pathspace.training import GaugeFixed, PathSpace
from pathspace.training.experiments import run_folder
from pathspace.training.experiments.recipe import Recipe, prepare, schedule
from pathspace.training.experiments.run_folder import BEST, LAST
from pathspace.training.experiments.task import Split, Task
from pathspace.training.experiments.tasks import load_task
from pathspace.training.experiments.trainer import (
    Record,
    Training,
    lightning_trainer,
    run_epochs,
    score_split,
)

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture(scope="module")
def task() -> Task:
    return load_task("digits-rows", hidden=5)


class Noisy(nn.Module):
    """A classifier whose training draws random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(0.2)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.model(self.dropout(sequence))


class Stop(Callback):
    """Ctrl-C, after a step or before the validation that follows it."""

    def __init__(self, step: int, at_the_end: bool = False) -> None:
        self.step, self.at_the_end = step, at_the_end

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not self.at_the_end:
            raise KeyboardInterrupt

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def numbers(run: Training) -> list[Record]:
    """All epochs without their times."""
    return [replace(record, seconds=0.0) for record in run.records]


def weights(run: Training) -> Tensor:
    return nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{**row, "seconds": ""} for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", ["sgd", "gsgd"])
def test_a_run_is_the_plain_loop_of_recorded_runs(task: Task, name: str) -> None:
    factor = schedule("cosine 0.1")
    assert factor is not None
    model, optimizer = prepare(task, Recipe(name, lr=0.05))
    order = torch.Generator().manual_seed(3)
    data = TensorDataset(task.train.inputs, task.train.targets)
    batches = BatchSampler(RandomSampler(data, generator=order), 100, drop_last=False)
    loader = DataLoader(data, sampler=batches, batch_size=None, generator=order)
    losses, step = [], 0
    for _ in range(3):
        total = 0.0
        for inputs, targets in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * factor(step / 36)
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            total, step = total + loss.item() * len(inputs), step + 1
        losses.append(total / len(data))
    before = torch.get_rng_state()
    run = Training(
        task,
        *prepare(task, Recipe(name, lr=0.05)),
        epochs=3,
        batch_size=100,
        seed=3,
        schedule=factor,
        clip=0.5,
    )
    run_epochs(run, lightning_trainer(run))
    assert [record.train_loss for record in run.records] == losses
    assert [record.step for record in run.records] == [12, 24, 36]
    assert torch.equal(weights(run), nn.utils.parameters_to_vector(model.parameters()))
    # the score is a mean over examples, and the caller's random numbers are left alone
    outputs = model(task.test.inputs)
    expected = (f(outputs, task.test.targets).item() for f in (task.loss, task.metric))
    assert score_split(run, task.test) == pytest.approx(tuple(expected))
    assert torch.equal(before, torch.get_rng_state())


def make(task: Task, kind: str, **options: Any) -> Training:
    """A run with noise, a schedule and a bound of the gradient."""
    of_torch = torch.optim.AdamW
    if kind in ("GaugeFixed", "PathSpace"):
        model, x = task.make_model(1), task.example_inputs()[0]
        graph = ps.trace(model, x)
        if kind == "GaugeFixed":
            optimizer: Any = GaugeFixed(of_torch(model.parameters(), lr=0.01), graph, model=model)
        else:
            inner = of_torch(model.named_parameters(), lr=1e-4)
            optimizer = PathSpace(inner, graph.skeleton())
    else:
        model, optimizer = prepare(task, Recipe(kind, seed=1))
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 300, "seed": 5, "clip": 1.0}
    return Training(
        task, Noisy(model), optimizer, **{**settings, "schedule": schedule("cosine 0.2"), **options}
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "stop", "saved"),
    [
        ("gsgd", Stop(3), 2),
        ("gsgd", Stop(5), 4),
        ("gmomentum", Stop(4, at_the_end=True), 3),
        ("gadam", Stop(6), 5),
        ("path-sgd", Stop(7), 6),
        ("recurrent-gsgd", Stop(8), 7),
        ("GaugeFixed", Stop(6), 5),
        ("PathSpace", Stop(6), 5),
        ("AdamW", Stop(12, at_the_end=True), 11),
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    task: Task, kind: str, stop: Stop, saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "CHECKPOINT_SECONDS", 0.0)
    whole, part, rest = (make(task, kind) for _ in range(3))
    run_epochs(whole, lightning_trainer(whole, folder=tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run_epochs(part, lightning_trainer(part, folder=tmp_path / "part", callbacks=[stop]))
    last = tmp_path / "part" / LAST
    assert torch.load(last, weights_only=True)["global_step"] == saved
    run_epochs(rest, lightning_trainer(rest, folder=tmp_path / "part"), last)
    assert torch.equal(weights(rest), weights(whole)) and numbers(rest) == numbers(whole)
    assert table(tmp_path / "part") == table(tmp_path / "whole") and len(whole.records) == 3


def test_accumulated_passes_are_one_step_and_checkpoints_wait_for_it(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "CHECKPOINT_SECONDS", 0.0)
    double = replace(
        task,
        train=Split(task.train.inputs.double(), task.train.targets),
        valid=Split(task.valid.inputs.double(), task.valid.targets),
        make_model=lambda seed: task.make_model(seed).double(),
    )
    runs = [
        Training(
            double, *prepare(double, Recipe("gmomentum")), epochs=2, batch_size=size, accumulate=n
        )
        for size, n in ((300, 1), (60, 5))
    ]
    for run in runs:
        run_epochs(run, lightning_trainer(run))
    torch.testing.assert_close(weights(runs[0]), weights(runs[1]), rtol=1e-10, atol=1e-12)
    whole, part, rest = (make(task, "gsgd", batch_size=100, accumulate=5) for _ in range(3))
    run_epochs(whole, lightning_trainer(whole))
    with pytest.raises(KeyboardInterrupt):
        run_epochs(part, lightning_trainer(part, folder=tmp_path, callbacks=[Stop(2)]))
    run_epochs(rest, lightning_trainer(rest), tmp_path / LAST)
    assert torch.equal(weights(rest), weights(whole))


def test_early_stopping_takes_the_best_weights(task: Task, tmp_path: Path) -> None:
    metrics = iter((0.9, 0.5, 0.5, 0.7, 0.1))
    staged = replace(task, metric=lambda *_: torch.tensor(next(metrics)))
    kept = []

    class Keep(Callback):
        def on_train_epoch_end(self, _: Any, run: Any) -> None:
            kept.append(weights(run))

    run = Training(staged, *prepare(task, Recipe("sgd")), epochs=5, batch_size=400)
    run_epochs(run, lightning_trainer(run, folder=tmp_path, patience=2, callbacks=[Keep()]))
    assert len(run.records) == len(kept) == 4 and torch.equal(weights(run), kept[1])
    best = torch.load(tmp_path / BEST, weights_only=True)["state_dict"]
    last = torch.load(tmp_path / LAST, weights_only=True)["state_dict"]
    assert torch.equal(best["model.readout.weight"], run.model.readout.weight)  # type: ignore[union-attr]
    assert not torch.equal(last["model.readout.weight"], best["model.readout.weight"])
    # it has stopped for good, unless it is given more patience
    for patience, epochs in ((2, 4), (9, 5)):
        more = Training(staged, *prepare(task, Recipe("sgd")), epochs=5, batch_size=400)
        trainer = lightning_trainer(more, folder=tmp_path, patience=patience)
        assert len(run_epochs(more, trainer, tmp_path / LAST)) == epochs
        assert torch.equal(weights(more), kept[1]) == (epochs == 4)


@pytest.mark.parametrize("kind", ["sgd", "gsgd", "adam"])
@pytest.mark.parametrize("wrong", [{"lr": 1e300}, {"decay": 1e300}])
def test_a_run_that_diverges_keeps_its_last_sound_checkpoint(
    task: Task, kind: str, wrong: dict[str, float], tmp_path: Path
) -> None:
    run = Training(task, *prepare(task, Recipe(kind, **wrong)), epochs=2, batch_size=600)  # type: ignore[arg-type]
    run_epochs(run, lightning_trainer(run, folder=tmp_path))
    assert run.diverged and len(run.records) < 2
    assert (tmp_path / LAST).exists() == bool(run.records)
    calls = iter((1.0, 1.0, math.inf))
    staged = replace(
        task, loss=lambda o, t: task.loss(o, t) * (1.0 if o.requires_grad else next(calls))
    )
    run = Training(staged, *prepare(task, Recipe("sgd")), epochs=9, batch_size=600)
    assert len(run_epochs(run, lightning_trainer(run))) == 2 and run.diverged


def test_other_errors_of_a_step_are_not_hidden(task: Task) -> None:
    model, optimizer = prepare(task, Recipe("sgd"))
    broken = replace(task, loss=lambda outputs, _: outputs @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size mismatch"):
        run_epochs(run := Training(broken, model, optimizer, epochs=1), lightning_trainer(run))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda content: content[:-1], "it is damaged"),
        (lambda content: content[:3000] + bytes(200) + content[3200:], "it is damaged"),
        (lambda content: b"", "it is damaged"),
        (None, "with batch_size = 300, this run asks for batch_size = 400"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_sentence(
    task: Task, spoil: Callable[[bytes], bytes] | None, sentence: str, tmp_path: Path
) -> None:
    run = make(task, "gsgd", epochs=1)
    run_epochs(run, lightning_trainer(run, folder=tmp_path))
    if spoil is not None:
        (tmp_path / LAST).write_bytes(spoil((tmp_path / LAST).read_bytes()))
    other = make(task, "gsgd", epochs=1, **({} if spoil else {"batch_size": 400}))
    with pytest.raises(InputError, match=sentence) as found:
        run_epochs(other, lightning_trainer(other), tmp_path / LAST)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("wrong", ["epochs", "batch_size", "accumulate", "seed", "clip"])
def test_numbers_out_of_range_are_refused(task: Task, wrong: str) -> None:
    with pytest.raises(InputError, match=f"found {wrong}=-1"):
        make(task, "sgd", **{wrong: -1})
    empty = replace(task, valid=Split(task.valid.inputs[:0], task.valid.targets[:0]))
    with pytest.raises(InputError, match="validation_examples=0"):
        make(empty, "sgd")
