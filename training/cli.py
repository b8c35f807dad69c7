"""The commands ``pathspace train``, ``sweep``, ``reproduce``, ``demo`` and ``data``.

Torch and the tasks are imported inside the commands, so that the help of the
command line answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pathspace.cli_errors import FAILED, INTERRUPTED
from pathspace.options import JsonOption, Rule
from pathspace.training.experiments.names import known_experiment, known_task

if TYPE_CHECKING:
    from rich.console import Console


class Scale(StrEnum):
    """Size of an experiment."""

    embedded = "embedded"
    fetched = "fetched"
    full = "full"


class Init(StrEnum):
    """Initialisation of the weights."""

    default = "default"
    unit_skeleton = "unit-skeleton"
    unbalanced = "unbalanced"


def register(app: typer.Typer) -> None:
    """Add the commands of this package to the command line.

    Args:
        app: the application of ``pathspace``, which finds this function by its entry point.

    Example:
        >>> app = typer.Typer()
        >>> register(app)
        >>> [command.callback.__name__ for command in app.registered_commands]
        ['train', 'sweep', 'reproduce', 'demo']
    """
    app.command()(train)
    app.command()(sweep)
    app.command()(reproduce)
    app.command()(demo)
    data = typer.Typer(help="List and fetch real data for the tasks.", no_args_is_help=True)
    data.command("list")(list_data)
    data.command("fetch")(fetch_data)
    app.add_typer(data, name="data")


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
                " bible-characters. "
                "With --data: mnist-28, mnist-98, "
                "mnist-28-permuted, mnist-98-permuted, mnist-images, cifar10, cifar100, ptb,"
                " ptb-characters, wikitext-2, "
                "enwik8, wmt16."
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
                "path-sgd (scaled by the path norm), average, rescaled, signs. For recurrent layers"
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
        Rule,
        typer.Option(
            help=(
                "How the skeleton chooses one entering and one leaving weight per unit: modulo is"
                " the paper's "
                "Algorithm 1, magnitude takes the largest weights, random takes random weights."
            )
        ),
    ] = Rule.modulo,
    init: Annotated[
        Init | None,
        typer.Option(
            help=(
                "default keeps the initial weights of the model; unit-skeleton sets the skeleton"
                " weights to +1 or "
                "-1. Without it, the steps of gsgd are multiplied by up to 1e13."
            ),
            show_default="unit-skeleton for gsgd, else default",
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
                "without interruption. Give more --epochs to train a finished run further."
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
                "Number of steps between measurements of the efficiency of the chain, the drift of"
                " conserved "
                "quantities and the clipped steps on path values, written to diagnostics.jsonl. The"
                " cost is shown, "
                "and training is bitwise the same."
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
    from pathspace.training.command import TrainRequest, run_training

    if config is not None:
        from pathspace.errors import InputError
        from pathspace.training.config import read_config

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
    if not run_training(request, _console(request.json)):
        raise typer.Exit(INTERRUPTED)


def sweep(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            callback=known_task,
            help="Name of the task, see pathspace train --help.",
        ),
    ],
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="Same values as for pathspace train.")
    ] = "gsgd",
    lr: Annotated[
        list[float] | None,
        typer.Option(
            help="A learning rate; repeat the option for more.", show_default="0.02 0.05 0.1 0.2"
        ),
    ] = None,
    tau: Annotated[
        list[float] | None,
        typer.Option(
            help="A strength of the penal connection; repeat the option for more.", show_default="0"
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds (0, 1, ...) for every combination.")
    ] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training split.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 32,
    init: Annotated[
        Init | None, typer.Option(help="Starting point.", show_default="the optimizer's own")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Size of the model.", show_default="the task's own")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder with your data.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each on one thread.")] = 1,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder of the results.", show_default="runs/sweep-TASK-OPTIMIZER"
        ),
    ] = None,
) -> None:
    """Train every combination of learning rate and penal strength; print one table, the best first.

    [bold]pathspace sweep digits-rows --lr 0.05 --lr 0.1 --lr 0.2 --jobs 2[/]
    [bold]pathspace sweep number-words --optimizer adam --lr 0.005 --tau 0 --tau 1e-4[/]

    Finished runs are kept in the folder: the same command, or one with more values, continues
    there. Only the validation split is used.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    from pathspace.training.experiments.reproduce.trial import Trial
    from pathspace.training.experiments.sweep import run_sweep

    options = tuple(
        (key, value) for key, value in (("hidden", hidden), ("data", data)) if value is not None
    )
    base = Trial(
        task,
        optimizer,
        0.0,
        0,
        epochs,
        batch_size,
        init=init.value if init else None,
        options=options,
    )
    rates = (0.02, 0.05, 0.1, 0.2) if lr is None else lr
    console, folder = _console(None), out or f"runs/sweep-{task}-{optimizer}"
    with _interruptible(console):
        run_sweep(base, rates, (0.0,) if tau is None else tau, seeds, folder, jobs, console)


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            callback=known_experiment,
            help=(
                "With minutes on one thread: race (effects of initialisation and optimizer; 3),"
                " smnist (G-SGD, SGD, "
                "Path-SGD, "
                "G-Adam, Adam on sequential digits; 10), language (stacked ReLU RNN; 6), rcnn"
                " (recurrent convolutions; 4), "
                "time (of a step; 3), toy (28 parameters; 3), translation (efficiency of the chain;"
                " 8), image and depth "
                "(penal connection; 6 each), regularisers (it beside others; 14), "
                "ideal-direction (1), optimizers (a leaderboard; 90); "
                "page, which writes page and pictures again from the records in --out; claims,"
                " which judges every "
                "statement of the papers by them and by the tests; or recipes, which writes a page"
                " of the papers' recipes."
            ),
        ),
    ],
    scale: Annotated[
        Scale,
        typer.Option(
            help=(
                "embedded fits one thread of a small computer; fetched takes hours and needs"
                " 'pathspace data fetch'; "
                "full is the paper's own setting."
            )
        ),
    ] = Scale.embedded,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder with the paper's data, for --scale full.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for record and picture; the page is DIR.md.")
    ] = "reproduction",
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each on one thread.")] = 1,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help=(
                "Run on the workers of a Dask cluster: the address of its scheduler, such as"
                " tcp://host:8786, or the "
                "file that it wrote."
            ),
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=(
                "Number of new seeds for the reported runs. Default: 5, for optimizers 10; with"
                " --scale fetched, "
                "the spread of the first 5 determines it."
            ),
            show_default=False,
        ),
    ] = None,
    shrink: Annotated[
        int,
        typer.Option(
            min=1,
            help=(
                "Divide all budgets by this number, for a short test of the command; the record"
                " says so."
            ),
        ),
    ] = 1,
    device: Annotated[
        str, typer.Option(help="Device of the runs: cpu, cuda, mps or auto.")
    ] = "cpu",
    precision: Annotated[
        str,
        typer.Option(
            help="Precision of the runs: 32-true, 64-true, bf16-mixed, or 16-mixed (on a GPU)."
        ),
    ] = "32-true",
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help=(
                "For optimizers: start no new run after this many; the journal in --out contains"
                " the others."
            ),
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the number of runs and about how long they take, without running them.",
        ),
    ] = False,
) -> None:
    """Run one of the papers' tables or figures again, with intervals, a paired test and a
    verdict by a fixed rule.

    [bold]pathspace reproduce smnist[/]
    [bold]pathspace reproduce smnist --scale full --data mnist/[/]
    [bold]pathspace reproduce claims --out docs/reproduction[/]

    Finished runs are kept in runs/trials (those of optimizers in --out), so an interrupted
    experiment continues there.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    options = {**locals(), "scale": scale.value}
    from pathspace.training.experiments.reproduce.command import run_reproduction

    console = _console(None)
    with _interruptible(console):
        run_reproduction(console=console, **options)


def demo(
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for all output files.")
    ] = "demo-output",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the short race.")] = 3,
) -> None:
    """Show the main uses of the library, in about a minute on two cores.

    The demo certifies unmodified models (a trained EfficientNet and a Llama, if pathspace[demo] is
    installed). It rescales and balances the trained model without a change of its function, and
    rescales it so that rounding to 8 bits hurts less. It writes masks, compares SGD and G-SGD on
    digits, and writes one report.

    Exit codes: 0 all theorems hold, 1 one fails, 2 bad input, 130 interrupted.
    """
    from pathspace.training.experiments.demo import run_demo

    console = _console(None)
    with _interruptible(console, f"the files in {out} are complete."):
        holds = run_demo(out, seeds=seeds, console=console)
    if not holds:
        raise typer.Exit(FAILED)


def list_data() -> None:
    """List the data sets that can be fetched, with their licences and where they are."""
    from rich.console import Console
    from rich.table import Table

    from pathspace.training.experiments.data import SOURCES, data_folder

    table = Table("name", "what", "licence", "folder")
    for name, source in SOURCES.items():
        folder = data_folder(name)
        table.add_row(
            name, source.about, source.licence, str(folder) if folder.is_dir() else "not fetched"
        )
    Console().print(table)


def fetch_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fashion-mnist or bible.")],
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for the data.", show_default="the user's cache"),
    ] = None,
) -> None:
    """Download a data set from Debian's packages, check its digests, and store it for the tasks.

    [bold]pathspace data fetch fashion-mnist[/]

    Exit codes: 0 the data set is in the folder, 2 it cannot be downloaded.
    """
    from pathlib import Path

    from pathspace.progress import show_progress
    from pathspace.training.experiments.data import fetch, source

    known = source(name)
    with show_progress("Fetching", name):
        folder = fetch(name, None if out is None else Path(out))
    _console(None).print(
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


def _console(json: str | None) -> Console:
    from rich.console import Console

    # Standard output belongs to the JSON where that is asked for.
    return Console(stderr=json == "-")
