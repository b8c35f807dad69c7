"""The command ``pathspace train``.

The work is in ``train_command.py``, which is imported when the options have been read, so that the
help of the command line answers at once.
"""

from __future__ import annotations

from enum import StrEnum
from types import SimpleNamespace
from typing import Annotated

import typer
from typer import Argument, Option

from pathspace.cli.errors import INTERRUPTED
from pathspace.cli.options import JsonOption, SkeletonRule

from .names import TASKS, known_task

Init = StrEnum("Init", {"default": "default", "unit_skeleton": "unit-skeleton"})

DataOption = Annotated[
    str | None, Option(metavar="DIR", help="Folder with your data.", show_default=False)
]
DeviceOption = Annotated[str, Option("--device", "--accelerator", help="cpu, cuda, mps or auto.")]
TASK_HELP = (
    f"One of: {', '.join(TASKS)}. Fashion, bible and catalogues need 'pathspace data fetch', the"
    " papers' own data --data."
)
OPTIMIZER_HELP = (
    "On the values of basis paths: gsgd, gmomentum (0.9), gadam. On weights: sgd, momentum (0.9),"
    " adam, path-sgd (scaled by the path norm). For recurrent layers alone, and sgd for the rest:"
    " recurrent-gsgd, recurrent-path-sgd. Or any optimizer of torch by the name of its class."
)
SCHEDULE_HELP = (
    "How the learning rate moves: constant, linear or cosine (to 0), 'drops 0.5 0.75' (divided by"
    " 10 at these shares of the run), 'inverse-root 0.1'; 'cosine 0.1' begins with a warm-up."
)
INIT_HELP = (
    "default keeps the initial weights; unit-skeleton sets those of the skeleton to +1 or -1,"
    " without which the steps of gsgd are multiplied by up to 1e13."
)


def train(
    task: Annotated[str, Argument(metavar="TASK", callback=known_task, help=TASK_HELP)],
    optimizer: Annotated[str, Option(help=OPTIMIZER_HELP)] = "gsgd",
    lr: Annotated[
        float | None, Option(help="Learning rate.", show_default="the optimizer's own")
    ] = None,
    schedule: Annotated[str, Option(metavar="NAME", help=SCHEDULE_HELP)] = "constant",
    decay: Annotated[
        float | None,
        Option(min=0, help="Weight decay, or of path values.", show_default="the optimizer's own"),
    ] = None,
    clip: Annotated[
        float | None,
        Option(min=0, help="Largest norm of a step's gradient.", show_default="no bound"),
    ] = None,
    augment: Annotated[
        str, Option(metavar="NAME", help="Random changes of training images: none, or crop-flip.")
    ] = "none",
    dropout: Annotated[
        float | None,
        Option(min=0, max=1, help="Share of values dropped.", show_default="the task's own"),
    ] = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the training split.")] = 60,
    patience: Annotated[
        int | None,
        Option(
            min=1,
            help="Stop after so many epochs without a lower validation metric; keep the best.",
            show_default="train to the last epoch",
        ),
    ] = None,
    batch_size: Annotated[int, Option(min=1, help="Examples per step.")] = 32,
    hidden: Annotated[
        int | None, Option(min=1, help="Size of the model.", show_default="the task's own")
    ] = None,
    data: DataOption = None,
    tau: Annotated[
        float, Option(min=0, help="Strength of the penal connection; residual models only.")
    ] = 0.0,
    seed: Annotated[
        int, Option(min=0, max=2**32 - 1, help="Of the initial weights and the order of batches.")
    ] = 0,
    rule: Annotated[SkeletonRule, Option(help="Of the skeleton.")] = SkeletonRule.modulo,
    init: Annotated[Init | None, Option(help=INIT_HELP, show_default="the optimizer's own")] = None,
    out: Annotated[
        str | None,
        Option(
            metavar="DIR",
            help="Folder of metrics.csv, result.json, last.ckpt (every half minute), best.ckpt.",
            show_default="runs/TASK-OPTIMIZER-lrLR-seedSEED",
        ),
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue from last.ckpt; on a CPU bit for bit.")
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Start a new run in the folder of another.")
    ] = False,
    device: DeviceOption = "cpu",
    precision: Annotated[
        str, Option(help="32-true, 64-true, bf16-mixed, or 16-mixed (on a GPU).")
    ] = "32-true",
    tensorboard: Annotated[
        bool, Option("--tensorboard", help="Also write the metrics for TensorBoard.")
    ] = False,
    diagnostics: Annotated[
        int | None,
        Option(min=1, metavar="STEPS", help="Measure the run every so many steps."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Train a task's model with one optimizer, on weights or in path space.

    [bold]pathspace train digits-rows[/] [bold]pathspace train digits-rows --optimizer sgd
    --init unit-skeleton --lr 0.2[/] [bold]pathspace train digits-rows --epochs 200 --out
    runs/long[/], interrupted by Ctrl-C, and later [bold]pathspace train digits-rows --epochs
    200 --out runs/long --resume[/]

    The test split is used once, after the last epoch. A loss that is no longer finite ends the run,
    which is recorded as diverged.

    Exit codes: 0 done (diverged runs included), 2 bad input, 130 interrupted.
    """
    options = {**locals(), "rule": rule.value, "init": init.value if init else None}
    from rich.console import Console

    from .train_command import run_training

    # Standard output belongs to the JSON where that is asked for.
    if not run_training(SimpleNamespace(**options), Console(stderr=json == "-")):
        raise typer.Exit(INTERRUPTED)
