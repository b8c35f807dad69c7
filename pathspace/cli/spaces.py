"""``pathspace spaces`` and ``rotate``: which matrices may mix features, and checkpoints in
another basis.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

import pathspace as ps

from ..errors import InputError
from ..files.writing import STDOUT
from .checkpoints import Destination, Target, rewriting, three_arguments
from .options import (
    InputOption,
    JsonOption,
    SeedOption,
    TargetArgument,
    TrainOption,
    argument,
)
from .progress import deliver, loading, tell

RecipeFormat = StrEnum("RecipeFormat", {"llm_compressor": "llm-compressor"})
Matrices = StrEnum("Matrices", ["hadamard", "random"])


def spaces(
    target: TargetArgument,
    inputs: InputOption = None,
    train: TrainOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """List the spaces of features of a model, and the matrices that may mix each of them.

    [bold]pathspace spaces transformers:path/to/config.json[/]

    Exit codes: 0 listed, 2 bad input.
    """
    with loading(target, inputs, "Reading the spaces of", train=train, seed=seed) as loaded:
        found = loaded.call(ps.spaces)
    facts = {"dimension": found.dimension, "spaces": [space.to_dict() for space in found]}
    deliver(facts, json, found)


def rotate(
    target: Target,
    source: Annotated[
        str | None,
        argument("[SOURCE]", "A safetensors file, or a folder with one or several."),
    ] = None,
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

    Exit codes: 0 written, 2 bad input. The same command completes a folder after a
    run that was broken off.
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


COMMANDS = (spaces, rotate)
