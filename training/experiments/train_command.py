"""The work of ``pathspace train`` after its options have been read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from pathspace.diagnostics import lightning_callback
from pathspace.errors import InputError
from pathspace.files.writing import ensure_writable, write_text

from ..penal import penalise_
from .recipe import Recipe, augmentation, prepare, schedule
from .reproduce.trial import versions
from .run_folder import LAST
from .task import one_thread
from .tasks import Task, load_task
from .trainer import Score, Training, lightning_trainer, run_epochs, score_split


def run_training(options: SimpleNamespace, console: Console) -> bool:
    """Train, write the files and print the final table."""
    names = (options.optimizer, options.lr, options.init, options.rule, options.seed, options.decay)
    recipe = Recipe(*names)
    folder = Path(
        options.out or f"runs/{options.task}-{recipe.optimizer}-lr{recipe.lr:g}-seed{recipe.seed}"
    )
    ensure_writable(options.json)
    with one_thread():
        training = _training(options, recipe)
        task, watched = training.task, []
        if options.diagnostics:
            table = folder / f"diagnostics{'-resumed' * options.resume}.csv"
            page = table.with_suffix(".html")
            watched = [lightning_callback("model", every=options.diagnostics, csv=table, page=page)]
        trainer = lightning_trainer(
            training,
            folder=folder,
            patience=options.patience,
            tensorboard=options.tensorboard,
            bar=True,
            callbacks=watched,
            device=options.device,
            devices=options.devices,
            precision=options.precision,
        )
        if options.tau:
            # times the number of processes, because the penalty is a sum over examples
            # but gradients are averaged
            penalise_(training.model, *task.example_inputs(), tau=options.tau * trainer.world_size)
        if trainer.is_global_zero:
            _prepare(folder, options)
        try:
            run_epochs(training, trainer, folder / LAST if options.resume else None)
        except KeyboardInterrupt:
            console.print(
                f"Interrupted; what {folder / LAST} has is kept: add --resume to continue."
                if (folder / LAST).exists()
                else "Interrupted before the first checkpoint; nothing is kept.",
                markup=False,
                soft_wrap=True,
            )
            return False
        score = None if training.diverged else score_split(training, task.test)
    if trainer.is_global_zero:
        result = _result(training, score, options.patience is not None)
        result["files"] = [str(path) for path in sorted(folder.iterdir())]
        for each in watched:
            seen = each.watch
            result["diagnostics"] = {"rows": len(seen.rows), "seconds": seen.seconds}
            result["diagnostics"] |= {"causes": [*map(str, seen.causes)], "notes": seen.notes}
        for path in (str(folder / "result.json"), options.json):
            write_text(json.dumps(result, indent=2), path)
        console.print(_table(task, result))
    return True


def _training(options: SimpleNamespace, recipe: Recipe) -> Training:
    """Return the run before its first step, or refuse what would have no effect."""
    moves, change = schedule(options.schedule), augmentation(options.augment)
    if options.tau and options.precision == "16-mixed":
        raise InputError(
            "--tau would be divided by the loss scale of --precision 16-mixed; use bf16-mixed."
        )
    if recipe.optimizer == "Rprop" and (moves or options.clip):
        raise InputError(
            "torch's Rprop takes step sizes from the signs of gradients, so --schedule and --clip"
            " would change nothing; leave them out, or choose another optimizer."
        )
    given = {name: getattr(options, name) for name in ("hidden", "data", "dropout")}
    given = {name: value for name, value in given.items() if value is not None}
    task = load_task(options.task, **given)
    if change is not None:
        change(task.train.inputs[:1])
    usual = {"tau": 0.0, "precision": "32-true", "schedule": "constant", "augment": "none"}
    others = {name: getattr(options, name) for name in usual}
    others = {name: value for name, value in others.items() if value != usual[name]}
    return Training(
        task,
        *prepare(task, recipe),
        epochs=options.epochs,
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        seed=options.seed,
        schedule=moves,
        clip=options.clip,
        augment=change,
        settings={**given, **others, **recipe.settings()},
    )


def _prepare(folder: Path, options: SimpleNamespace) -> None:
    """Protect the run that is in the folder, and remove what a killed one left incomplete."""
    if (folder / LAST).exists() and not (options.resume or options.overwrite):
        raise InputError(
            f"The folder '{folder}' has a run; add --resume to continue it, --overwrite to start a"
            " new one, or choose another --out."
        )
    for left in (*folder.glob(".pathspace-*"), *([] if options.resume else folder.glob("*.ckpt"))):
        left.unlink(missing_ok=True)


def _result(training: Training, score: Score | None, best: bool) -> dict[str, Any]:
    records, name = training.records, training.task.metric_name
    result = {
        "settings": {**training.run_settings, "epochs": training.epochs},
        "epochs_done": len(records),
        "diverged": training.diverged,
        "seconds": records[-1].seconds if records else 0.0,
        "versions": versions(),
    }
    if records and score is not None:
        # (of equal ones the first, as its weights were kept)
        shown = min(records, key=lambda record: record.valid_metric) if best else records[-1]
        result |= {"epoch_of_weights": shown.epoch, "train_loss": shown.train_loss}
        result |= {"valid_loss": shown.valid_loss, f"valid_{name}": shown.valid_metric}
        result |= {"test_loss": score.loss, f"test_{name}": score.metric}
    return result


def _table(task: Task, result: Mapping[str, Any]) -> Table:
    title = f"{task.name} with {result['settings']['optimizer']}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("task", task.description)
    for key, value in result.items():
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        if isinstance(value, dict):
            text = ", ".join(f"{name} {each}" for name, each in value.items())
        elif isinstance(value, list):
            text = ", ".join(value)
        table.add_row(key.replace("_", " "), text)
    return table
