"""The command line ``pathspace``: its own commands, and those that other packages add.

Torch and the analysis are imported inside the commands, so that ``pathspace
--help`` answers at once. Commands call the public functions of the package and no others.
"""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from .commands import channels, checkpoints, fitting, graphs
from .errors import ErrorSentenceGroup, say

_GROUP = "pathspace.commands"

app = typer.Typer(
    name="pathspace",
    cls=ErrorSentenceGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Exit codes: 0 success; 1 a statement or a check fails; 2 bad input; 3 nothing could be"
        " compared; 130 interrupted."
    ),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pathspace {version('pathspace')}")
        raise typer.Exit


@app.callback()
def root(
    shown: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    # Taken from the command line before typer sees it, and declared here for --help only.
    debug: Annotated[
        bool, typer.Option("--debug", help="With any command: show the traceback of an error.")
    ] = False,
) -> None:
    """The path space of PyTorch models: symmetries, basis paths, certificates, masks.

    A TARGET is [bold]package.module:name[/] or [bold]path/to/file.py:name[/], or a model of a
    library: [bold]transformers:path/to/config.json[/], [bold]timm:NAME[/],
    [bold]torchvision:NAME[/]. The name is a torch.nn.Module, its class (called without arguments),
    or a function that returns a model or (model, example inputs), where the example is a tensor, a
    tuple of positional inputs, or a dict of keyword inputs.

    [bold]pathspace verify net.py:Net --input 2x3x32x32[/]
    [bold]pathspace masks net.py:Net --input 2x3x32x32 -o masks.safetensors[/]
    [bold]pathspace draw net.py:Net --input 2x3x32x32 -o graph.svg[/]

    pathspace COMMAND --help explains one command.
    """


for _commands in (graphs, checkpoints, fitting, channels):
    for _command in _commands.COMMANDS:
        app.command()(_command)


def load_extensions() -> None:
    """Let other packages add commands through the entry point group ``pathspace.commands``.

    Each entry point names a function ``register(app: typer.Typer) -> None``. One that fails is
    reported in a sentence, and the other commands go on working. The laboratory is part of a
    checkout alone: a package that is not there has no commands.
    """
    for point in sorted(entry_points(group=_GROUP), key=lambda point: point.name):
        try:
            point.load()(app)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and point.module.startswith(str(error.name)):
                continue
            if "--debug" in sys.argv:
                traceback.print_exception(error, file=sys.stderr)
            reason = f"{type(error).__name__} ({' '.join(str(error).split())})"
            say(
                "Warning",
                "yellow",
                f"The commands of {point.name} ({point.value}) are missing: {reason}.",
            )


def main() -> None:
    """Run the ``pathspace`` console command."""
    words = sys.argv[1:]
    own = {getattr(command.callback, "__name__", "") for command in app.registered_commands}
    first = next((word for word in words if not word.startswith("-")), None)
    # The packages behind other commands may be slow to import, and are not needed for our own.
    if first not in own and "--version" not in words:
        load_extensions()
    app()
