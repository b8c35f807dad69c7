"""``pathspace rescale``, ``balance`` and ``rotate`` write checkpoints, of any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import pathspace as ps

from ...errors import InputError
from ...files.writing import STDOUT, delivering, expect_outputs
from ..options import InputOption, JsonOption, SeedOption, argument
from ..progress import deliver, loading, tell

if TYPE_CHECKING:
    from ..target import Target as LoadedTarget

Target = Annotated[str, argument("[TARGET]", "The model; omit it for a folder with config.json.")]
A_CHECKPOINT = "A safetensors file, or a folder with one or several."
Source = Annotated[str, argument("SOURCE", A_CHECKPOINT)]
Destination = Annotated[
    str | None, argument("[DESTINATION]", "Output, like SOURCE; - for standard output.")
]
RecipeFormat = StrEnum("RecipeFormat", ["llm-compressor"])
Matrices = StrEnum("Matrices", ["hadamard", "random"])
ExactOption = Annotated[
    bool,
    typer.Option("--exact/--all", help="Leave alone units that are free without an epsilon only."),
]


def three_arguments(target: str, source: str, destination: str | None) -> tuple[str, str, str]:
    """Target, source and destination, where the first may have been left out."""
    if destination is None:
        return f"transformers:{target}", target, source
    return target, source, destination


@contextmanager
def rewriting(
    owner: str, target: str, source: str, destination: str, inputs: list[str] | None, seed: int
) -> Iterator[tuple[LoadedTarget, str | Path]]:
    """The loaded model, and the file of the new checkpoint: of bytes to print for ``-``."""
    if destination == STDOUT and Path(source).is_dir():
        raise InputError(
            f"{owner} found the folder {source!r} for standard output, expected one file; name a"
            " folder."
        )
    file = delivering(STDOUT, ".safetensors") if destination == STDOUT else nullcontext(destination)
    with file as place, loading(target, inputs, f"Running {owner} on", seed=seed) as loaded:
        yield loaded, place


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

    Exit codes: 0 written, 2 bad input. The same command completes a folder that is unfinished.
    """
    from ...files.tensor_files import read_saved

    target, source, destination = three_arguments(target, source, destination)
    with rewriting("rescale", target, source, destination, inputs, seed) as (loaded, place):
        graph = loaded.call(ps.trace)
        scales = graph.random_powers(seed, 3) if phi is None else read_saved(phi, "rescale")
        ps.rescale_files(graph, scales, source, place, exact)
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
    """Balance a checkpoint: write its rescaled copy of smallest norm, which is the same function.

    [bold]pathspace balance net.py:net model.safetensors balanced.safetensors[/]
    [bold]pathspace balance path/to/folder path/to/new-folder[/]

    Exit codes: 0 written, 2 bad input. The same command completes a folder that is unfinished.
    """
    target, source, destination = three_arguments(target, source, destination)
    expect_outputs("balance", json, (), destination if destination == STDOUT else None)
    with rewriting("balance", target, source, destination, inputs, seed) as (loaded, place):
        graph = loaded.call(ps.trace)
        found = ps.balance_files(graph, source, place, p, tolerance, exact)
    facts = {
        "units": graph.num_units,
        "before": found.before,
        "after": found.after,
        "imbalance": found.imbalance,
        "left_alone": {why: len(units) for why, units in found.left_alone.items()},
        "rounds": found.steps,
    }
    deliver(facts, json, str(found), destination)


def rotate(
    target: Target,
    source: Annotated[str | None, argument("[SOURCE]", A_CHECKPOINT)] = None,
    destination: Destination = None,
    by: Annotated[
        Matrices,
        typer.Option(help="Hadamard matrices with random signs, or random elements of all groups."),
    ] = Matrices.hadamard,
    form: Annotated[
        RecipeFormat | None,
        typer.Option("--format", help="Print a recipe for this tool; only TARGET is read."),
    ] = None,
    inputs: InputOption = None,
    seed: SeedOption = 0,
) -> None:
    """Rotate a checkpoint: write it in another basis of its features, in which it computes the
    same function. Or print a recipe for a quantisation tool that does it.

    [bold]pathspace rotate path/to/folder path/to/new-folder[/]
    [bold]pathspace rotate transformers:path/to/config.json --format llm-compressor > recipe.yaml[/]

    Exit codes: 0 written, 2 bad input. The same command completes a folder that is unfinished.
    """
    if form is not None and source is None:
        with loading(target, inputs, "Reading the spaces of", seed=seed) as loaded:
            recipe = ps.rotation_recipe(loaded.model, loaded.call(ps.spaces), form.value)
        print(recipe)
        return
    if form is not None or source is None:
        raise InputError(
            f"rotate found {'no' if source is None else 'a'} SOURCE with"
            f" {'no' if form is None else 'a'} --format, expected one of the two; give SOURCE and"
            " DESTINATION to write a checkpoint, or --format to print a recipe."
        )
    target, source, destination = three_arguments(target, source, destination)
    with rewriting("rotate", target, source, destination, inputs, seed) as (loaded, place):
        found = loaded.call(ps.spaces)
        ps.rotate_files(found, by.value, source, place, seed)
    tell(f"Rotated {len(found.free):,} spaces. Wrote {destination}", destination == STDOUT)


COMMANDS = (rescale, balance, rotate)
