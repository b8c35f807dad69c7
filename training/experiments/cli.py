"""The laboratory's commands: ``pathspace train``, ``reproduce``, ``demo`` and ``data``.

Torch and the tasks are imported inside the commands, so that the help of the
command line answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pathspace.cli.errors import FAILED, INTERRUPTED

from .names import expect_packages, experiments_help, known_experiment
from .train_cli import DataOption, DeviceOption, train

if TYPE_CHECKING:
    from rich.console import Console


Scale = StrEnum("Scale", ["embedded", "fetched", "full"])


def register(app: typer.Typer) -> None:
    """Add the commands of this package to the command line."""
    app.command()(train)
    app.command()(reproduce)
    app.command()(demo)
    data = typer.Typer(help="List and fetch real data for the tasks.", no_args_is_help=True)
    data.command("list")(list_data)
    data.command("fetch")(fetch_data)
    app.add_typer(data, name="data")


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


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", callback=known_experiment, help=NAME_HELP)],
    scale: Annotated[Scale, typer.Option(help=SCALE_HELP)] = Scale.embedded,
    data: DataOption = None,
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for record and picture; the page is DIR.md.")
    ] = "reproduction",
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each on one thread.")] = 1,
    seeds: Annotated[int | None, typer.Option(min=2, help=SEEDS_HELP, show_default=False)] = None,
    most_seeds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="With --scale fetched: at most so many, however many their spread asks for.",
            show_default="no bound",
        ),
    ] = None,
    shrink: Annotated[
        int, typer.Option(min=1, help="Divide all budgets by this, for a test of the command.")
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
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for all output files.")
    ] = "demo-output",
    seeds: Annotated[int, typer.Option(min=1, help="Networks that are trained.")] = 3,
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
    """List the data sets that can be fetched, with their licences, where they come from, and
    where they are.
    """
    from rich.console import Console
    from rich.table import Column, Table

    from .data import SOURCES, fetched

    ends = (Column(name, overflow="fold") for name in ("from", "folder"))
    table = Table("name", "what", "licence", *ends)
    for name, source in SOURCES.items():
        folder = str(fetched(name) or "not fetched")
        table.add_row(name, source.about, source.licence, source.place, folder)
    Console().print(table)


def fetch_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of pathspace data list.")],
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for the data.", show_default="the user's cache"),
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
