"""Where G-SGD can start: a bound on the multiplier, a unit skeleton, the
largest-magnitude skeleton.

``PYTHONPATH=tests python -m benchmarks.starts`` trains every contender with the same seeds, epochs,
batches and number of learning rates; the validation split alone chooses the rate of each, and the
test split is looked at once, at that rate. Figures go to ``docs/data/starts.json``; the table of
the page is printed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

import pathspace as ps
from benchmarks.figures import keep, markdown
from pathspace.training import GSGD, init_skeleton_
from pathspace.training.experiments.intervals import t_interval
from pathspace.training.experiments.task import Task
from pathspace.training.experiments.tasks import load_task

SEEDS, EPOCHS, BATCH = 5, 20, 32
USUAL = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Start:
    """A contender with its largest multiplier and the learning rates it may choose from."""

    label: str
    path_space: bool
    unit: bool = False
    rule: str = "modulo"
    bound: float | None = None
    rates: tuple[float, ...] = USUAL


MAGNITUDE = "default, largest-magnitude skeleton"
STARTS = (
    Start("unit skeleton, G-SGD", True, unit=True),
    Start("default, G-SGD with `max_multiplier=1`", True, bound=1.0),
    Start(f"{MAGNITUDE} and `max_multiplier=1`", True, rule="magnitude", bound=1.0),
    Start(f"{MAGNITUDE} alone", True, rule="magnitude", rates=(1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1)),
    Start("default, G-SGD with nothing done", True, rates=(1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)),
    Start("unit skeleton, SGD on weights", False, unit=True),
    Start("default, SGD on weights", False),
)


@torch.no_grad()
def errors(task: Task, model: torch.nn.Module) -> tuple[float, float]:
    """Error rates on the validation and the test split; a model that is not finite errs always."""
    rates = []
    for split in (task.valid, task.test):
        outputs = model(split.inputs)
        rates.append(
            float(task.metric(outputs, split.targets)) if bool(outputs.isfinite().all()) else 1.0
        )
    return rates[0], rates[1]


def train(task: Task, start: Start, lr: float, seed: int) -> tuple[float, float]:
    """One run; validation and test error at its end."""
    model = task.make_model(seed)
    # the magnitude rule looks at the weights of this very model
    skeleton = ps.trace(model, *task.example_inputs()).skeleton(start.rule, seed=seed)
    if start.unit:
        init_skeleton_(model, skeleton)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if start.path_space:
        optimizer = GSGD(
            model.named_parameters(), lr=lr, skeleton=skeleton, max_multiplier=start.bound
        )
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(task.train), generator=order).split(BATCH):
            optimizer.zero_grad()
            loss = task.loss(model(task.train.inputs[chosen]), task.train.targets[chosen])
            if not math.isfinite(loss.item()):
                return 1.0, 1.0
            loss.backward()
            optimizer.step()
    return errors(task, model)


def measured(start: Start) -> dict[str, Any]:
    """A contender at all its rates with all seeds."""
    task = load_task("digits-rows")
    runs = {
        lr: [train(task, start, lr, seed) for seed in range(SEEDS)]
        for lr in track(start.rates, start.label.replace("`", ""))
    }
    chosen = min(runs, key=lambda lr: sum(valid for valid, _ in runs[lr]))
    found = [1 - test for _, test in runs[chosen]]
    errors_at = {f"{lr:g}": [valid for valid, _ in pairs] for lr, pairs in runs.items()}
    row = {"start": start.label, "rates": list(start.rates), "lr": chosen}
    return {**row, "valid_error": errors_at, "test_accuracy": found}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown, best mean first."""
    head = "start and optimizer | test accuracy (mean ± 95 %) | worst seed | learning rate"
    lines = []
    for row in sorted(rows, key=lambda row: -sum(row["test_accuracy"])):
        found = row["test_accuracy"]
        edge = " (end of its grid)" if row["lr"] in (row["rates"][0], row["rates"][-1]) else ""
        middle, worst = t_interval(found).show(".3f"), f"{min(found):.3f}"
        lines.append([row["start"], middle, worst, f"{row['lr']:g}{edge}"])
    return markdown(head, lines, texts=4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    about = {"task": "digits-rows", "seeds": SEEDS, "epochs": EPOCHS, "batch": BATCH}
    rows = [measured(start) for start in STARTS]
    keep("starts", {**about, "torch": torch.__version__, "rows": rows})
    print(table(rows))
