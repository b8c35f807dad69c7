"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

SkeletonRule = StrEnum("SkeletonRule", ["modulo", "magnitude", "random"])
NormEps = StrEnum("NormEps", ["ignore", "respect"])


def file_option(help: str, *names: str) -> Any:
    """A file to write: ``--output``, unless another option is named."""
    names = names or ("--output", "-o")
    return typer.Option(*names, metavar="FILE", help=help, show_default=False)


def argument(metavar: str, help: str = "A safetensors file, or one of torch.save.") -> Any:
    """An argument without a default to show, such as a file or folder of weights."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


TargetArgument = Annotated[
    str,
    argument(
        "TARGET",
        "package.module:name, path/to/file.py:name, transformers:config.json, timm:NAME or"
        " torchvision:NAME",
    ),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SIZES[:DTYPE]",
        help=(
            "One example input, such as 2x3x224x224 or 2x16:int64; repeat it for each positional"
            " input. Replaces the example inputs that TARGET supplies."
        ),
        show_default=False,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        max=2**32 - 1,
        help="Seed of example inputs, of weights if TARGET builds the model, and of the rule.",
    ),
]
RuleOption = Annotated[
    SkeletonRule, typer.Option("--rule", help="Rule by which the skeleton chooses its weights.")
]
NormEpsOption = Annotated[
    NormEps,
    typer.Option(
        "--norm-eps",
        help="Ignore the epsilon of normalisations, or respect it: it pins the scale before.",
    ),
]
TrainOption = Annotated[
    bool | None,
    typer.Option(
        "--train/--eval", help="Put the model in this mode.", show_default="its current mode"
    ),
]
JsonOption = Annotated[
    str | None, file_option("Also write the result as JSON; - prints only JSON.", "--json")
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help=(
            "Typical inputs, with samples along the first dimension: a .npy file, or .safetensors"
            " with one tensor for each input, by the inputs' names or in alphabetical order."
        ),
        show_default="the example inputs",
    ),
]
