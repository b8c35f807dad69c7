"""Commands on checkpoints: ``pathspace rescale`` and ``pathspace balance``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import InputOption, JsonOption, SeedOption
from .progress import deliver, show_progress, tell

if TYPE_CHECKING:
    from ..reduction import ReductionGraph

Target = Annotated[
    str,
    typer.Argument(
        metavar="[TARGET]",
        help=(
            "The model. You can omit it for a folder with the config.json of a transformers model."
        ),
        show_default=False,
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A safetensors file, or a folder with one or several.",
        show_default=False,
    ),
]
Destination = Annotated[
    str | None,
    typer.Argument(
        metavar="[DESTINATION]",
        help="Output: a file or a folder, like SOURCE; - for standard output.",
        show_default=False,
    ),
]

ExactOption = Annotated[
    bool,
    typer.Option(
        "--exact/--all",
        help="Do not change units that are free only if normalisations have no epsilon.",
    ),
]


def _three(target: str, source: str, destination: str | None) -> tuple[str, str, str]:
    """Target, source and destination, where the first may have been left out."""
    return (
        (f"transformers:{target}", target, source)
        if destination is None
        else (target, source, destination)
    )


def _traced(target: str, inputs: list[str] | None, seed: int) -> ReductionGraph:
    from ..tracing import trace
    from .target import load_target

    loaded = load_target(target, inputs or (), seed=seed)
    return trace(loaded.model, *loaded.args, kwargs=loaded.kwargs)


@contextmanager
def _place(owner: str, source: str, destination: str) -> Iterator[str | Path]:
    """Where the new checkpoint is written: the destination, or a file whose bytes go to
    standard output for ``-``.
    """
    from ..errors import InputError
    from ..files.writing import STDOUT, spooled

    if destination != STDOUT:
        yield destination
        return
    if Path(source).is_dir():
        raise InputError(
            f"{owner} found the folder {source!r} for standard output, expected one file; name a"
            " folder."
        )
    with spooled(".safetensors", sys.stdout) as file:
        yield file


def rescale(
    target: Target,
    source: Source,
    destination: Destination = None,
    phi: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File of numpy.save with the log-scales of the units.",
            show_default="random powers of two",
        ),
    ] = None,
    exact: ExactOption = True,
    inputs: InputOption = None,
    seed: SeedOption = 0,
) -> None:
    """Rescale a checkpoint without a change of the model's function.

    [bold]pathspace rescale net.py:net model.safetensors rescaled.safetensors[/]
    [bold]pathspace rescale path/to/folder path/to/new-folder[/]

    Exit codes: 0 written, 2 bad input. The same command completes a folder after a
    run that was broken off.
    """
    import numpy as np
    import torch

    from ..errors import InputError
    from ..evidence.bench import random_powers
    from ..files.writing import STDOUT, existing_file
    from ..gauge.streaming import rescale_files

    target, source, destination = _three(target, source, destination)
    with (
        _place("rescale", source, destination) as place,
        show_progress("Tracing", target) as status,
    ):
        graph = _traced(target, inputs, seed)
        if phi is None:
            scales = random_powers(graph, seed, 3)
        else:
            try:
                file = existing_file(phi, "rescale", "write the log-scales with numpy.save")
                read = np.load(file, allow_pickle=False)
                if not isinstance(read, np.ndarray) or read.dtype.kind not in "fiu":
                    raise ValueError("no array of real numbers")
                scales = torch.from_numpy(read.astype(np.float64))
            except (OSError, ValueError, EOFError) as error:
                raise InputError(
                    f"The log-scales in '{phi}' cannot be read ({error}); write them with"
                    " numpy.save."
                ) from error
        status("Rescaling")
        rescale_files(graph, scales, source, place, exact)
    tell(f"Rescaled {graph.num_units:,} units. Wrote {destination}", destination == STDOUT)


def balance(
    target: Target,
    source: Source,
    destination: Destination = None,
    p: Annotated[
        float, typer.Option("--p", help="Exponent p of the norm of the weights to minimise.")
    ] = 2.0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest relative difference between the weights that enter and leave a unit.",
            show_default="1e-12, or 1e-3 for weights that do not fit into memory",
        ),
    ] = None,
    exact: ExactOption = True,
    inputs: InputOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Balance a checkpoint: write its rescaled copy with the smallest norm, which
    computes the same function.

    [bold]pathspace balance net.py:net model.safetensors balanced.safetensors[/]
    [bold]pathspace balance path/to/folder path/to/new-folder[/]

    Exit codes: 0 written, 2 bad input. The same command completes a folder after a
    run that was broken off.
    """
    from ..files.writing import STDOUT, expect_outputs
    from ..gauge.streaming import balance_files

    target, source, destination = _three(target, source, destination)
    expect_outputs("balance", json, (), destination if destination == STDOUT else None)
    with (
        _place("balance", source, destination) as place,
        show_progress("Tracing", target) as status,
    ):
        graph = _traced(target, inputs, seed)
        status("Balancing")
        found = balance_files(graph, source, place, p, tolerance, exact)
    facts = {
        "units": graph.num_units,
        "before": found.before,
        "after": found.after,
        "imbalance": found.imbalance,
        "left_alone": {why: len(units) for why, units in found.left_alone.items()},
        "rounds": found.steps,
    }
    deliver(facts, json, f"{found}\nWrote {destination}", destination == STDOUT)


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(rescale)
    app.command()(balance)
