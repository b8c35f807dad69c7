"""The laboratory's commands: ``pathspace train``, ``reproduce``, ``demo`` and ``data``. Torch and
the tasks are imported inside them, so that help answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from pathspace.cli.errors import FAILED, INTERRUPTED
from pathspace.cli.options import JsonOption, SkeletonRule

from .names import TASKS, expect_packages, experiments_help, known_experiment, known_task

if TYPE_CHECKING:
    from rich.console import Console

Scale = StrEnum("Scale", ["embedded", "fetched", "full"])
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
DECAY_HELP = "Weight decay, or of path values; else the optimizer's own."
DROPOUT_HELP = "Share of values dropped; else the task's own."
PATIENCE_HELP = "Stop after so many epochs without a lower validation metric; keep the best."
OUT_HELP = (
    "Folder of metrics.csv, result.json, last.ckpt (every half minute) and best.ckpt; else"
    " runs/TASK-OPTIMIZER-lrLR-seedSEED."
)
DEVICES_HELP = "Processes that share every pass; else those that torchrun has started, or one."
INIT_HELP = (
    "default keeps the initial weights; unit-skeleton sets those of the skeleton to +1 or -1,"
    " without which the steps of gsgd are multiplied by up to 1e13."
)
NAME_HELP = (
    f"With minutes on one thread: {experiments_help()}; page, which writes page and pictures again"
    " from the records in --out; claims, which judges every statement of the papers by them and by"
    " the tests; or recipes, which writes a page of the papers' recipes."
)
SCALE_HELP = (
    "embedded fits one thread of a small computer; fetched takes hours and needs 'pathspace data"
    " fetch'; full is the paper's own setting."
)
SEEDS_HELP = (
    "Number of new seeds for the reported runs. Default: 5, for optimizers 10; with --scale"
    " fetched, the spread of the first 5 determines it."
)

MOST_SEEDS_HELP = "With --scale fetched: at most so many, however many their spread asks for."
CLUSTER_HELP = "Run on the workers of a Dask cluster: its scheduler's address, or its file."


def register(app: typer.Typer) -> None:
    """Add the commands of this package to the command line."""
    app.command()(train)
    app.command()(reproduce)
    app.command()(demo)
    data = typer.Typer(help="List and fetch real data for the tasks.", no_args_is_help=True)
    data.command("list")(list_data)
    data.command("fetch")(fetch_data)
    app.add_typer(data, name="data")


def train(
    task: Annotated[str, Argument(metavar="TASK", callback=known_task, help=TASK_HELP)],
    optimizer: Annotated[str, Option(help=OPTIMIZER_HELP)] = "gsgd",
    lr: Annotated[float | None, Option(help="Learning rate; else the optimizer's own.")] = None,
    schedule: Annotated[str, Option(metavar="NAME", help=SCHEDULE_HELP)] = "constant",
    decay: Annotated[float | None, Option(min=0, help=DECAY_HELP)] = None,
    clip: Annotated[float | None, Option(min=0, help="Largest norm of a step's gradient.")] = None,
    augment: Annotated[
        str, Option(metavar="NAME", help="Random changes of training images: none, or crop-flip.")
    ] = "none",
    dropout: Annotated[float | None, Option(min=0, max=1, help=DROPOUT_HELP)] = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the training split.")] = 60,
    patience: Annotated[int | None, Option(min=1, help=PATIENCE_HELP)] = None,
    batch_size: Annotated[int, Option(min=1, help="Examples per pass through the model.")] = 32,
    accumulate: Annotated[
        int, Option(min=1, help="Passes per step, whose gradients are weighted by examples.")
    ] = 1,
    hidden: Annotated[int | None, Option(min=1, help="Size of the model; else the task's.")] = None,
    data: DataOption = None,
    tau: Annotated[
        float, Option(min=0, help="Strength of the penal connection; residual models only.")
    ] = 0.0,
    seed: Annotated[
        int, Option(min=0, max=2**32 - 1, help="Of the initial weights and the order of batches.")
    ] = 0,
    rule: Annotated[SkeletonRule, Option(help="Of the skeleton.")] = SkeletonRule.modulo,
    init: Annotated[Init | None, Option(help=INIT_HELP, show_default="the optimizer's own")] = None,
    out: Annotated[str | None, Option(metavar="DIR", help=OUT_HELP)] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue from last.ckpt; on a CPU bit for bit.")
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Start a new run in the folder of another.")
    ] = False,
    device: DeviceOption = "cpu",
    devices: Annotated[int | None, Option(min=1, help=DEVICES_HELP)] = None,
    precision: Annotated[
        str, Option(help="32-true, 64-true, bf16-mixed, or 16-mixed (on a GPU).")
    ] = "32-true",
    tensorboard: Annotated[
        bool, Option("--tensorboard", help="Also write the metrics for TensorBoard.")
    ] = False,
    diagnostics: Annotated[
        int | None, Option(min=1, metavar="STEPS", help="Measure the run every so many steps.")
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


def reproduce(
    name: Annotated[str, Argument(metavar="NAME", callback=known_experiment, help=NAME_HELP)],
    scale: Annotated[Scale, Option(help=SCALE_HELP)] = Scale.embedded,
    data: DataOption = None,
    out: Annotated[
        str, Option(metavar="DIR", help="Folder for record and picture; the page is DIR.md.")
    ] = "reproduction",
    jobs: Annotated[int, Option(min=1, help="Processes, each on one thread.")] = 1,
    cluster: Annotated[str | None, Option(metavar="ADDRESS", help=CLUSTER_HELP)] = None,
    seeds: Annotated[int | None, Option(min=2, help=SEEDS_HELP, show_default=False)] = None,
    most_seeds: Annotated[int | None, Option(min=2, help=MOST_SEEDS_HELP)] = None,
    shrink: Annotated[
        int, Option(min=1, help="Divide all budgets by this, for a test of the command.")
    ] = 1,
    device: DeviceOption = "cpu",
) -> None:
    """Run one of the papers' tables or figures again, with intervals, a paired test and a
    verdict by a fixed rule.

    [bold]pathspace reproduce smnist[/]
    [bold]pathspace reproduce smnist --scale full --data mnist/[/]
    [bold]pathspace reproduce claims --out docs/reproduction[/]

    Finished runs are kept in runs/trials (those of optimizers also in --out), so an interrupted
    experiment continues there.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    options = {**locals(), "scale": scale.value}
    from .reproduce.command import run_reproduction

    console = _console()
    with _interruptible(console):
        run_reproduction(console=console, **options)


def demo(
    out: Annotated[str, Option(metavar="DIR", help="Folder for all output files.")] = "demo-output",
    seeds: Annotated[int, Option(min=1, help="Networks that are trained.")] = 3,
) -> None:
    """Show the main uses of the library, in about a minute on two cores.

    The demo certifies unmodified models (a trained EfficientNet and a Llama, if pathspace[demo] is
    installed). It rescales and balances the trained model without a change of its function,
    rescales it so that rounding to 8 bits hurts less, and removes channels. It trains small
    networks from a scrambled start, with and without a fixed gauge, and writes masks and a report.

    Exit codes: 0 all theorems hold, 1 one fails, 2 bad input, 130 interrupted.
    """
    expect_packages()
    from .demo import run_demo

    console = _console()
    with _interruptible(console, f"the files in {out} are complete."):
        holds = run_demo(out, seeds=seeds, console=console)
    if not holds:
        raise typer.Exit(FAILED)


def list_data() -> None:
    """List the data sets that can be fetched: licences, where they come from, where they are."""
    from rich.table import Column, Table

    from .data import SOURCES, fetched

    ends = (Column(name, overflow="fold") for name in ("from", "folder"))
    table = Table("name", "what", "licence", *ends)
    for name, source in SOURCES.items():
        folder = str(fetched(name) or "not fetched")
        table.add_row(name, source.about, source.licence, source.place, folder)
    _console().print(table)


def fetch_data(
    name: Annotated[str, Argument(metavar="NAME", help="A name of pathspace data list.")],
    out: Annotated[
        str | None, Option(metavar="DIR", help="Folder for the data; else the user's cache.")
    ] = None,
) -> None:
    """Download a data set in packages of Debian (by apt-get), check its digests,
    and store it for the tasks.

    [bold]pathspace data fetch fashion-mnist[/]

    Exit codes: 0 the data set is in the folder, 2 it cannot be downloaded.
    """
    from pathlib import Path

    from pathspace.cli.progress import show_progress

    from .data import fetch, source

    known = source(name)
    with show_progress("Fetching", name):
        folder = fetch(name, None if out is None else Path(out))
    _console().print(
        f"{name}: {known.about} ({known.licence}) in {folder}", markup=False, highlight=False
    )


@contextmanager
def _interruptible(
    console: Console,
    kept: str = "runs that had ended are kept: the same command goes on from there.",
) -> Iterator[None]:
    """A context in which Ctrl-C ends the command with a sentence about what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"Interrupted; {kept}", markup=False)
        raise typer.Exit(INTERRUPTED) from None


def _console() -> Console:
    from rich.console import Console

    return Console()
