"""What ``pathspace train`` does once its options have been read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric
from lightning_fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table

from pathspace.errors import InputError
from pathspace.files import ensure_writable, replacing
from training.checkpoint import protect_unfinished
from training.history import History, Score
from training.penal import penalize
from training.progress import run_progress
from training.recipe import Init, Recipe, Rule, prepare
from training.tasks import Task, load_task
from training.threads import one_thread
from training.trainer import Trainer, make_folder

# torch's state dictionaries and Fabric's devices, by the names that users type.
DEVICES = ("cpu", "cuda", "mps", "auto")


@dataclass(frozen=True)
class TrainRequest:
    """The options of ``pathspace train``; see its help for what they mean."""

    task: str
    optimizer: str
    lr: float | None
    epochs: int
    batch_size: int
    accumulate: int
    hidden: int | None
    data: str | None
    tau: float
    seed: int
    rule: Rule
    init: Init | None
    out: str | None
    checkpoint_every: int | None
    resume: bool
    overwrite: bool
    device: str
    json: str | None

    @staticmethod
    def types() -> dict[str, type]:
        """Return the type of every option that a configuration file may set.

        Example:
            >>> TrainRequest.types()["lr"]
            <class 'float'>
        """
        texts = dict.fromkeys(("optimizer", "rule", "init", "data", "out", "device", "json"), str)
        numbers = dict.fromkeys(("epochs", "batch_size", "accumulate", "hidden", "seed", "checkpoint_every"), int)
        return {**texts, **numbers, "lr": float, "tau": float, "resume": bool, "overwrite": bool}

    @property
    def task_options(self) -> dict[str, Any]:
        """Return the options of the task that were given."""
        return {key: value for key, value in (("hidden", self.hidden), ("data", self.data)) if value is not None}


def run_training(request: TrainRequest, console: Console) -> bool:
    """Train, write the files and print the final table.

    Args:
        request: what to train.
        console: where bar and table go.

    Returns:
        Whether the run came to its end; ``False`` after an interrupt, which is told in one sentence.

    Raises:
        InputError: a name is unknown, a file cannot be written or read, or an unfinished run is in the way.
    """
    task = load_task(request.task, **request.task_options)
    recipe = Recipe(request.optimizer, request.lr, request.init, request.rule, request.seed)
    fabric = _fabric(request.device)
    if request.json not in (None, "-"):
        ensure_writable(str(request.json))
    folder = Path(request.out or f"runs/{task.name}-{recipe.optimizer}-lr{recipe.rate:g}-seed{recipe.seed}")
    make_folder(folder)
    ensure_writable(folder / "metrics.csv")
    if not (request.resume or request.overwrite):
        protect_unfinished(fabric, folder / "checkpoint.pt")
    with one_thread(), run_progress(console, task) as begin:
        model, optimizer = prepare(task, recipe)
        if request.tau:
            penalize(model, *task.example_inputs(), tau=request.tau)
        trainer = Trainer(
            task,
            model,
            optimizer,
            epochs=request.epochs,
            batch_size=request.batch_size,
            accumulate=request.accumulate,
            seed=request.seed,
            folder=folder,
            checkpoint_every=request.checkpoint_every,
            settings={**request.task_options, **({"tau": request.tau} if request.tau else {}), **recipe.settings()},
            watch=begin(recipe.optimizer),
            fabric=fabric,
        )
        try:
            history = trainer.fit(resume=request.resume)
        except KeyboardInterrupt:
            history = None
        score = trainer.evaluate(task.test) if history and not history.diverged else None
    if history is None:
        kept = trainer.checkpoint
        console.print(
            f"Interrupted; the run up to its last checkpoint is kept in {kept}: add --resume to continue."
            if kept is not None and kept.exists()
            else "Interrupted before the first checkpoint; nothing is kept.",
            markup=False,
            soft_wrap=True,
        )
        return False
    result = _result(trainer, history, score)
    if request.json == "-":
        print(json.dumps(result, indent=2))
    elif request.json:
        with replacing(request.json) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console.print(_table(task, trainer, history, score))
    return True


def _fabric(device: str) -> Fabric:
    if device not in DEVICES:
        raise InputError(f"There is no device '{device}'; choose one of: {', '.join(DEVICES)}.")
    try:
        return Fabric(accelerator=device, devices=1)
    except (MisconfigurationException, RuntimeError) as error:
        raise InputError(f"The device '{device}' is not available here; use --device cpu.") from error


def _result(trainer: Trainer, history: History, score: Score | None) -> dict[str, Any]:
    last, name = history.last, trainer.task.metric_name
    sound = last if last is not None and last.finite else None
    return {
        "settings": {**trainer.settings, "epochs": trainer.epochs},
        "epochs_done": last.epoch if last else 0,
        "diverged": history.diverged,
        "train_loss": sound.train_loss if sound else None,
        "valid_loss": sound.valid_loss if sound else None,
        f"valid_{name}": sound.valid_metric if sound else None,
        "test_loss": score.loss if score else None,
        f"test_{name}": score.metric if score else None,
        "seconds": last.seconds if last else 0.0,
        "files": [str(path) for path in sorted(trainer.folder.iterdir())] if trainer.folder else [],
    }


def _table(task: Task, trainer: Trainer, history: History, score: Score | None) -> Table:
    last, settings = history.last, trainer.settings
    table = Table(title=f"{task.name} with {settings['optimizer']}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("task", task.description)
    table.add_row("settings", ", ".join(f"{k} {v}" for k, v in settings.items() if k not in ("task", "optimizer")))
    if last is not None:
        table.add_row("epochs", f"{last.epoch} ({last.step} steps, {last.seconds:.1f} s)")
        if score is not None:
            table.add_row("training loss", f"{last.train_loss:.4g}")
            table.add_row(f"validation {task.metric_name}", format(last.valid_metric, task.metric_format))
            table.add_row(f"test {task.metric_name}", f"[bold]{format(score.metric, task.metric_format)}[/]")
        else:
            table.add_row(
                "[red]diverged[/]",
                f"the loss stopped being finite in epoch {last.epoch}; a smaller --lr may cure it",
            )
    table.add_row("files", str(trainer.folder))
    return table
