"""The work of ``pathspace train`` after its options have been read."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric
from rich.console import Console
from rich.table import Table

from pathspace.diagnostics import Watching, watching
from pathspace.errors import AT_LEAST_1, SEED, InputError, expect_numbers
from pathspace.files.writing import ensure_writable, make_folder, write_text

from .. import ranks
from ..checkpoint import protect_unfinished
from ..history import History, Score
from ..launch import make_fabric, rank0_errors
from ..penal import penalize
from ..recipe import Init, Recipe, Rule, prepare
from ..schedules import schedule
from ..task import Task
from ..threads import one_thread
from ..trainer import Trainer
from .augment import augmentation
from .config import write_config
from .progress import run_progress
from .tasks import load_task
from .tensorboard import TensorBoard


@dataclass(frozen=True)
class TrainRequest:
    """The options of ``pathspace train``, explained in its help."""

    task: str
    optimizer: str
    lr: float | None
    schedule: str
    decay: float | None
    clip: float | None
    augment: str
    dropout: float | None
    epochs: int
    patience: int | None
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
    devices: int | None
    strategy: str
    precision: str
    tensorboard: bool
    diagnostics: int | None
    json: str | None

    @staticmethod
    def types() -> dict[str, type]:
        """Return the type of every option that a configuration file may set.

        Example:
            >>> TrainRequest.types()["lr"]
            <class 'float'>
        """
        kinds = {kind.__name__: kind for kind in (int, float, bool)}
        # (literals are texts, too)
        return {
            each.name: kinds.get(str(each.type).removesuffix(" | None"), str)
            for each in fields(TrainRequest)
        }

    @property
    def task_options(self) -> dict[str, Any]:
        """Return the given options of the task."""
        return {
            key: value
            for key in ("hidden", "data", "dropout")
            if (value := getattr(self, key)) is not None
        }

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings on which the result depends, besides the
        recipe, without unused ones.
        """
        chosen = {
            "tau": self.tau,
            "precision": self.precision if self.precision != "32-true" else None,
            "schedule": self.schedule if self.schedule != "constant" else None,
            "augment": self.augment if self.augment != "none" else None,
        }
        return {**self.task_options, **{key: value for key, value in chosen.items() if value}}

    def resolved(self, recipe: Recipe, processes: int) -> dict[str, Any]:
        """Return the configuration of the same run, with all defaults and without paths.

        Args:
            recipe: the recipe of this request.
            processes: number of processes.
        """
        where = ("out", "json", "resume", "overwrite")
        options = {key: value for key, value in asdict(self).items() if key not in where}
        chosen = {"lr": recipe.rate, "init": recipe.init, "decay": recipe.decay}
        return {**options, **chosen, "devices": processes}

    def recipe(self) -> Recipe:
        """Return optimizer and starting point."""
        return Recipe(self.optimizer, self.lr, self.init, self.rule, self.seed, self.decay)

    @property
    def folder(self) -> Path:
        """Return the folder of the files."""
        return Path(
            self.out
            or f"runs/{self.task}-{self.optimizer}-lr{self.recipe().rate:g}-seed{self.seed}"
        )


def run_training(request: TrainRequest, console: Console) -> bool:
    """Train, write the files and print the final table.

    Args:
        request: the options.
        console: the console for progress bar and table.

    Returns:
        Whether the run is complete; ``False`` after an interrupt, which is
        reported in one sentence.

    Raises:
        InputError: a name is unknown, a file cannot be written or read, or an
            unfinished run is in the way.
    """
    with rank0_errors():
        loggers = [TensorBoard(request.folder / "tensorboard")] if request.tensorboard else []
        fabric = make_fabric(
            request.device, request.devices, request.strategy, request.precision, loggers
        )
        fabric.launch()
        task, recipe = ranks.everyone(fabric, lambda: _read(request))
        return _train(
            request, fabric, task, recipe, console if fabric.is_global_zero else Console(quiet=True)
        )


def _read(request: TrainRequest) -> tuple[Task, Recipe]:
    if request.tau and request.precision == "16-mixed":
        raise InputError(
            "--tau would be divided by the loss scale of --precision 16-mixed; use bf16-mixed."
        )
    _check_numbers(request)
    moves = schedule(request.schedule)
    if request.optimizer == "Rprop" and (moves or request.clip):
        raise InputError(
            "torch's Rprop takes step sizes from the signs of gradients, so --schedule and --clip"
            " would change nothing; leave them out, or choose another optimizer."
        )
    task, recipe = load_task(request.task, **request.task_options), request.recipe()
    if change := augmentation(request.augment):
        change(task.train.inputs[:1])
    return task, recipe


def _check_numbers(request: TrainRequest) -> None:
    """Refuse numbers of a configuration file that the command line would refuse."""
    owner = "pathspace train"
    expect_numbers(owner, "a positive number", or_none=True, clip=request.clip)
    expect_numbers(owner, "a number from 0 to 1", or_none=True, dropout=request.dropout)
    expect_numbers(owner, "a number of at least 0", tau=request.tau)
    expect_numbers(owner, SEED, seed=request.seed)
    values = vars(request)
    needed, optional = (
        {name: values[name] for name in names.split()}
        for names in (
            "epochs batch_size accumulate",
            "patience hidden checkpoint_every diagnostics",
        )
    )
    expect_numbers(owner, AT_LEAST_1, **needed)
    expect_numbers(owner, AT_LEAST_1, or_none=True, **optional)


def _prepare_files(request: TrainRequest) -> None:
    """Raise an error before the run if files cannot or must not be written."""
    folder = request.folder
    ensure_writable(request.json)
    make_folder(folder)
    ensure_writable(folder / "metrics.csv")
    if not (request.resume or request.overwrite):
        protect_unfinished(folder / "checkpoint.pt")
    for half in folder.glob(".pathspace-*"):
        # an incomplete file of a killed run
        half.unlink(missing_ok=True)


def _write_configuration(request: TrainRequest, recipe: Recipe, processes: int) -> None:
    write_config(request.folder / "configuration.toml", request.resolved(recipe, processes))


def _train(
    request: TrainRequest, fabric: Fabric, task: Task, recipe: Recipe, console: Console
) -> bool:
    ranks.first(fabric, lambda: _prepare_files(request))
    with one_thread(), run_progress(console, task) as begin, ExitStack() as stack:
        model, optimizer = prepare(task, recipe)
        watched = None
        if request.diagnostics and fabric.is_global_zero:
            # (a watched run counts its own steps)
            table = request.folder / f"diagnostics{'-resumed' * request.resume}.csv"
            watched = stack.enter_context(
                watching(
                    model,
                    every=request.diagnostics,
                    csv=table,
                    page=table.with_suffix(".html"),
                )
            )
        if request.tau:
            # times the number of processes, because the penalty is a sum over examples
            # but gradients are averaged
            penalize(model, *task.example_inputs(), tau=request.tau * fabric.world_size)
        trainer = Trainer(
            task,
            model,
            optimizer,
            epochs=request.epochs,
            batch_size=request.batch_size,
            accumulate=request.accumulate,
            seed=request.seed,
            folder=request.folder,
            checkpoint_every=request.checkpoint_every,
            schedule=schedule(request.schedule),
            clip=request.clip,
            augment=augmentation(request.augment),
            patience=request.patience,
            settings={**request.settings, **recipe.settings()},
            watch=begin(recipe.optimizer),
            fabric=fabric,
        )
        if not request.resume:
            # (not before the run can begin: the file may be that of a finished run; a resumed run,
            # which may not fit its checkpoint, writes it at its end)
            ranks.first(fabric, lambda: _write_configuration(request, recipe, fabric.world_size))
        try:
            history = trainer.fit(resume=request.resume)
        except KeyboardInterrupt:
            history = None
        if history:
            ranks.first(fabric, lambda: _write_configuration(request, recipe, fabric.world_size))
        score = trainer.evaluate(task.test) if history and not history.diverged else None
        for logger in fabric.loggers:
            logger.finalize("success" if history else "aborted")
    if history is None:
        _say_interrupted(trainer.checkpoint, console)
        return False
    if fabric.is_global_zero:
        result = _result(trainer, history, score)
        if watched is not None:
            result["diagnostics"] = {
                "rows": len(watched.rows),
                "seconds": watched.seconds,
                "causes": [str(cause) for cause in watched.causes],
                "notes": watched.notes,
            }
        write_text(json.dumps(result, indent=2), request.json)
        console.print(_table(task, trainer, history, score, watched))
    return True


def _say_interrupted(kept: Path | None, console: Console) -> None:
    console.print(
        (
            f"Interrupted; the run up to its last checkpoint is kept in {kept}: add --resume to"
            " continue."
            if kept is not None and kept.exists()
            else "Interrupted before the first checkpoint; nothing is kept."
        ),
        markup=False,
        soft_wrap=True,
    )


def _result(trainer: Trainer, history: History, score: Score | None) -> dict[str, Any]:
    last, name = history.last, trainer.task.metric_name
    shown = trainer.record_of_weights(history)
    sound = shown if shown is not None and shown.finite else None
    return {
        "settings": {**trainer.settings, "epochs": trainer.epochs},
        "epochs_done": last.epoch if last else 0,
        "epoch_of_weights": sound.epoch if sound else None,
        "diverged": history.diverged,
        "train_loss": sound.train_loss if sound else None,
        "valid_loss": sound.valid_loss if sound else None,
        f"valid_{name}": sound.valid_metric if sound else None,
        "test_loss": score.loss if score else None,
        f"test_{name}": score.metric if score else None,
        "seconds": last.seconds if last else 0.0,
        "files": [str(path) for path in sorted(trainer.folder.iterdir())] if trainer.folder else [],
    }


def _table(
    task: Task,
    trainer: Trainer,
    history: History,
    score: Score | None,
    watched: Watching | None = None,
) -> Table:
    last, settings, shown = history.last, trainer.settings, trainer.record_of_weights(history)
    table = Table(
        title=f"{task.name} with {settings['optimizer']}", title_justify="left", show_header=False
    )
    table.add_column()
    table.add_column()
    table.add_row("task", task.description)
    table.add_row(
        "settings",
        ", ".join(f"{k} {v}" for k, v in settings.items() if k not in ("task", "optimizer")),
    )
    if last is not None:
        table.add_row("epochs", f"{last.epoch} ({last.step} steps, {last.seconds:.1f} s)")
        if score is not None and shown is not None:
            if trainer.patience is not None:
                early = "; none better came in time" if last.epoch < trainer.epochs else ""
                table.add_row("weights", f"those of epoch {shown.epoch}, the best{early}")
            table.add_row("training loss", f"{shown.train_loss:.4g}")
            table.add_row(
                f"validation {task.metric_name}", format(shown.valid_metric, task.metric_format)
            )
            table.add_row(
                f"test {task.metric_name}", f"[bold]{format(score.metric, task.metric_format)}[/]"
            )
        else:
            table.add_row(
                "[red]diverged[/]",
                f"the loss stopped being finite in epoch {last.epoch}; a smaller --lr may cure it",
            )
    if watched is not None and last is not None:
        share = watched.seconds / max(last.seconds, 1e-9)
        cost = f"{len(watched.rows)} rows in {watched.seconds:.2f} s, {share:.0%} of the run; "
        found = [f"{cost}{watched.preparation:.2f} s of preparation"]
        table.add_row("diagnostics", "\n".join([*found, *map(str, watched.causes), *watched.notes]))
    table.add_row("files", str(trainer.folder))
    return table
