"""The commands ``pathspace train`` and ``pathspace demo``.

Torch and the tasks are imported inside the commands, so that the help of the command line answers at once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

FAILED, INTERRUPTED = 1, 130


class Rule(StrEnum):
    """Which spanning trees are the skeleton."""

    modulo = "modulo"
    magnitude = "magnitude"
    random = "random"


class Init(StrEnum):
    """Where training starts."""

    default = "default"
    unit_skeleton = "unit-skeleton"


def register(app: typer.Typer) -> None:
    """Add the commands of this package to the command line.

    Args:
        app: the application of ``pathspace``, which finds this function by its entry point.

    Example:
        >>> app = typer.Typer()
        >>> register(app)
        >>> [command.callback.__name__ for command in app.registered_commands]
        ['train', 'demo']
    """
    app.command()(train)
    app.command()(demo)


def train(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="What to learn: digits-rows (a ReLU RNN reads 8x8 digits row by row), digits-rows-permuted (after "
            "one shuffle of the pixels), digits-pixels, digits-pixels-permuted (64 steps).",
        ),
    ],
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="On the values of basis paths: gsgd, gmomentum (0.9), gadam. On weights: sgd, momentum (0.9), adam, "
            "path-sgd (scaled by the path norm), average, rescaled, signs.",
        ),
    ] = "gsgd",
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate.", show_default="0.05 gsgd, sgd; 0.02 momentum; 0.002 adam"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training split.")] = 60,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 32,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden units of the model.")] = 100,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Fixes the first weights and the order of the batches.")
    ] = 0,
    rule: Annotated[
        Rule,
        typer.Option(
            help="How the skeleton picks one entering and one leaving weight per unit: modulo is the paper's "
            "Algorithm 1, magnitude takes the largest weights, random draws them."
        ),
    ] = Rule.modulo,
    init: Annotated[
        Init | None,
        typer.Option(
            help="default keeps the weights as the model is made; unit-skeleton sets the skeleton's to +1 or "
            "-1, without which the steps of gsgd are scaled by up to 1e13.",
            show_default="unit-skeleton for gsgd, else default",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder for metrics.csv and checkpoint.pt, both brought up to date after each epoch.",
            show_default="runs/TASK-OPTIMIZER-lrLR-seedSEED",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the checkpoint in the folder. On a CPU the result is, bit for bit, that of a "
            "run never interrupted. Give more --epochs to train a finished run further.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start afresh even if the folder holds an unfinished run.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")] = "cpu",
    json: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Also write the result as JSON; - prints JSON only.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a task's model with one optimizer, on weights or in path space.

    [bold]pathspace train digits-rows[/]
    [bold]pathspace train digits-rows --optimizer sgd --init unit-skeleton --lr 0.2[/]
    [bold]pathspace train digits-rows --epochs 200 --out runs/long[/], interrupted by Ctrl-C, and later
    [bold]pathspace train digits-rows --epochs 200 --out runs/long --resume[/]

    The test split is looked at once, after the last epoch. A loss that is no longer finite ends the run; it
    is recorded as diverged, and the checkpoint of the last sound epoch stays.

    Exit codes: 0 done (diverged runs included), 2 bad input, 130 interrupted.
    """
    from training.command import TrainRequest, run_training

    request = TrainRequest(
        task=task,
        optimizer=optimizer,
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
        hidden=hidden,
        seed=seed,
        rule=rule.value,
        init=init.value if init else None,
        out=out,
        resume=resume,
        overwrite=overwrite,
        device=device,
        json=json,
    )
    if not run_training(request, _console(json)):
        raise typer.Exit(INTERRUPTED)


def demo(
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for everything that is written.")] = "demo-output",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each of the training runs.")] = 60,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per learning rate and optimizer.")] = 3,
) -> None:
    """Show the library at work, in about two minutes on two cores.

    Four models are verified and their masks written. Then a ReLU RNN learns to read digits row by row, with
    SGD and with G-SGD: the same budget, the same learning rates to choose from, the same seeds.

    Exit codes: 0 done and all theorems hold, 1 one fails, 2 bad input, 130 interrupted.
    """
    from training.demo import run_demo

    console = _console(None)
    try:
        holds = run_demo(out, epochs=epochs, seeds=tuple(range(seeds)), console=console)
    except KeyboardInterrupt:
        console.print(f"Interrupted; what had been written in {out} is whole.", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    if not holds:
        raise typer.Exit(FAILED)


def _console(json: str | None) -> Console:
    from rich.console import Console

    # Standard output belongs to the JSON where that is asked for.
    return Console(stderr=json == "-")
