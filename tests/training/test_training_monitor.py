"""Diagnostics during training: the right numbers, the same training, and rows
that survive an interrupt.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_command import call, lines, stop_at

import pathspace as ps
from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.parameters.conservation import conserved
from pathspace.errors import InputError
from pathspace.training.experiments.tasks import load_task
from pathspace.training.monitor import OBSERVED, Monitor, Watchers
from pathspace.training.penal import penalize
from pathspace.training.recipe import Recipe, prepare
from pathspace.training.task import Task
from pathspace.training.trainer import Tick, Trainer

pytestmark = pytest.mark.usefixtures("one_core")


def weights(model: nn.Module) -> Tensor:
    return torch.cat([value.double().flatten() for value in model.state_dict().values()])


def small(name: str) -> Task:
    task = load_task(name, hidden=6)
    return replace(task, train=type(task.train)(task.train.inputs[:160], task.train.targets[:160]))


def train(
    task: Task, optimizer: str, tau: float, every: int | None
) -> tuple[Tensor, list[float], Monitor | None]:
    model, chosen = prepare(task, Recipe(optimizer, init="default" if optimizer == "sgd" else None))
    monitor = Monitor(task, model, chosen, every=every) if every else None
    if tau:
        penalize(model, *task.example_inputs(), tau=tau)
    history = Trainer(task, model, chosen, epochs=2, watch=monitor).fit()
    return weights(model), [record.train_loss for record in history.records], monitor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer", "tau"),
    [
        ("digits-rows", "gsgd", 0.0),
        ("digits-rows", "adam", 0.0),
        ("digits-images", "sgd", 1e-3),  # batch norm, penal connection
        ("digits-images", "gmomentum", 0.0),
        ("number-words", "sgd", 1e-4),  # dropout, a dictionary of tokens
    ],
)
def test_training_is_bitwise_the_same_with_diagnostics(
    name: str, optimizer: str, tau: float
) -> None:
    task = small(name)
    with_them, without = train(task, optimizer, tau, 3), train(task, optimizer, tau, None)
    assert torch.equal(with_them[0], without[0]) and with_them[1] == without[1]
    monitor = with_them[2]
    assert monitor is not None
    assert [row["step"] for row in monitor.rows] == [0, 3, 6, 9]
    residual, on_paths = name != "digits-rows", optimizer.startswith("g")
    for row in monitor.rows:
        assert (row["efficiency"] is not None) == residual and (
            row["sign_changes"] is not None
        ) == on_paths
    assert monitor.rows[0]["conserved_max"] == 0.0 and monitor.rows[-1]["conserved_max"] > 0.0
    assert len(monitor.notes) == (not residual) + (not on_paths)
    assert (
        monitor.seconds == pytest.approx(sum(row["seconds"] for row in monitor.rows))
        and monitor.preparation > 0
    )


def test_rows_hold_what_the_diagnostics_say() -> None:
    task = small("digits-images")
    model, optimizer = prepare(task, Recipe("gsgd"))
    before = conserved(ps.trace(model, *task.example_inputs()))
    monitor = Monitor(task, model, optimizer, every=10)
    penalize(model, *task.example_inputs(), tau=1e-3)
    Trainer(task, model, optimizer, epochs=2, watch=monitor).fit()
    model.penal_connection.remove()
    model.eval()
    chain = MarkovChain.trace(model, *task.example_inputs())
    seen = chain.observe(task.loss, task.valid.inputs[:OBSERVED], task.valid.targets[:OBSERVED])
    drift = (conserved(ps.trace(model, *task.example_inputs())) - before).abs()
    last = monitor.rows[-1]
    assert last["efficiency"] == pytest.approx(seen.mean_efficiency, rel=1e-6)
    assert (
        last["conserved_max"] == drift.max().item()
        and last["conserved_mean"] == drift.mean().item()
    )
    assert [last["sign_changes"], last["stopped"]] == optimizer.clip_counts.tolist()


def test_guards_that_act_are_counted() -> None:
    task = load_task("digits-rows", hidden=20)
    model, optimizer = prepare(task, Recipe("gsgd", lr=10.0))
    monitor = Monitor(task, model, optimizer, every=1)
    Trainer(task, model, optimizer, epochs=1, watch=monitor).fit()
    assert monitor.rows[0]["sign_changes"] == 0 < monitor.rows[-1]["sign_changes"]


def test_rows_of_an_interrupted_run_are_those_of_a_whole_one(tmp_path: Path) -> None:
    task = small("digits-rows")

    def run(folder: Path, resume: bool, stop: int = 0) -> None:
        model, optimizer = prepare(task, Recipe("gmomentum"))
        monitor = Monitor(task, model, optimizer, every=2, path=folder / "rows.jsonl")
        watch = Watchers(rows=monitor, stop=stop_at(stop))
        Trainer(
            task,
            model,
            optimizer,
            epochs=4,
            folder=folder,
            watch=watch,
            checkpoint_every=3,
            batch_size=20,
        ).fit(resume=resume)

    (tmp_path / "part").mkdir()
    run(tmp_path, False)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "part", False, stop=11)
    # What a killed run leaves: a row after the last checkpoint, and half of one.
    with (tmp_path / "part/rows.jsonl").open("a") as file:
        file.write('{"step": 12, "epo')
    assert [row["step"] for row in lines_that_are_whole(tmp_path / "part/rows.jsonl")] == [
        0,
        2,
        4,
        6,
        8,
        10,
    ]
    run(tmp_path / "part", True)
    one, two = lines(tmp_path / "rows.jsonl"), lines(tmp_path / "part/rows.jsonl")
    assert [{**row, "seconds": 0} for row in one] == [{**row, "seconds": 0} for row in two]
    assert [row["step"] for row in one] == list(range(0, 33, 2))


def lines_that_are_whole(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def test_command_shows_the_cost_and_what_does_not_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = [
        "train",
        "digits-rows",
        "--hidden",
        4,
        "--batch-size",
        300,
        "--optimizer",
        "sgd",
        "--epochs",
        2,
    ]
    done = call(*words, "--out", tmp_path, "--diagnostics", 2, "--json", tmp_path / "result.json")
    assert done.exit_code == 0, done.output
    assert "5 rows in " in done.output and "% of the run; " in done.output
    assert "Guards do not apply: SGD takes its steps on weights" in done.output
    assert "The chain's efficiency does not apply: " in done.output
    record = json.loads((tmp_path / "result.json").read_text())["diagnostics"]
    assert (
        record["rows"] == 5 == len(lines(tmp_path / "diagnostics.jsonl"))
        and len(record["notes"]) == 2
    )
    plain = tmp_path / "plain"
    assert call(*words, "--out", plain).exit_code == 0
    one, two = (
        torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
        for folder in (tmp_path, plain)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_cadence_and_full_files_are_one_sentence(tmp_path: Path) -> None:
    task = small("digits-rows")
    model, optimizer = prepare(task, Recipe("sgd"))
    with pytest.raises(InputError, match="cadence of 0 steps, expected at least 1"):
        Monitor(task, model, optimizer, every=0)
    monitor = Monitor(task, model, optimizer, every=1, path=tmp_path / "rows.jsonl")
    monitor._begun = True
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        InputError, match=r"no space left on device; make room and resume the run\."
    ):
        monitor(Tick(1, 5, 1, 0.5, 0.5))
