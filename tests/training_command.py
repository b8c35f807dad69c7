"""The training commands, called within the test's own process, and what tests of runs compare."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import pathspace.training.experiments.cli
from pathspace.cli.errors import ErrorSentenceGroup
from pathspace.training.experiments.tasks import load_task
from pathspace.training.history import EpochRecord, History, Tick
from pathspace.training.task import Split, Task

app = typer.Typer(cls=ErrorSentenceGroup, rich_markup_mode="rich")
pathspace.training.experiments.cli.register(app)


def call(*words: object) -> Result:
    """Run one command line."""
    return CliRunner().invoke(app, [str(word) for word in words])


def flat(text: str) -> str:
    """A text without line ends."""
    return " ".join(text.split())


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one on each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def weights(model: nn.Module) -> Tensor:
    """A copy of all parameters in one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def numbers(history: History) -> list[EpochRecord]:
    """All epochs without their times."""
    return [replace(record, seconds=0.0) for record in history.records]


def exact(name: str = "digits-rows", count: int | None = None) -> Task:
    """The first examples of a task, or all of them, in float64."""
    task = load_task(name, hidden=6)
    train = Split(task.train.inputs[:count].double(), task.train.targets[:count])
    valid = Split(task.valid.inputs.double(), task.valid.targets)
    return replace(
        task, train=train, valid=valid, make_model=lambda seed: task.make_model(seed).double()
    )


class Noisy(nn.Module):
    """A classifier whose training draws random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(0.2)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.model(self.dropout(sequence))


def stop_at(step: int) -> Callable[[Tick], None]:
    """A watcher that interrupts a run after a step."""

    def watch(tick: Tick) -> None:
        if tick.step == step:
            raise KeyboardInterrupt

    return watch
