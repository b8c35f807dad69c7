"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

# how the skeleton chooses its trees
SkeletonRule = StrEnum("SkeletonRule", ["modulo", "magnitude", "random"])
# whether the epsilon of a normalisation layer fixes the scale of its input
NormEps = StrEnum("NormEps", ["ignore", "respect"])


def output_option(help: str) -> Any:
    """The option ``--output``."""
    return typer.Option("--output", "-o", metavar="FILE", help=help, show_default=False)


def weights_argument(metavar: str, help: str = "A safetensors file, or one of torch.save.") -> Any:
    """A file or folder of weights."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help=(
            "package.module:name, path/to/file.py:name, transformers:config.json, timm:NAME or"
            " torchvision:NAME"
        ),
        show_default=False,
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
        help=(
            "Random seed of the example inputs, of the weights if TARGET builds the model, and of"
            " the rule."
        ),
    ),
]
RuleOption = Annotated[
    SkeletonRule, typer.Option("--rule", help="Rule by which the skeleton chooses its weights.")
]
NormEpsOption = Annotated[
    NormEps,
    typer.Option(
        "--norm-eps",
        help=(
            "Treat the scale before a normalisation as free (ignore its epsilon), or as pinned"
            " (respect it)."
        ),
    ),
]
TrainOption = Annotated[
    bool | None,
    typer.Option(
        "--train/--eval", help="Put the model in this mode.", show_default="its current mode"
    ),
]
JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Also write the result as JSON; - prints only JSON.",
        show_default=False,
    ),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help=(
            "Typical inputs, with samples along the first dimension: a .npy file, or .safetensors"
            " with one tensor for each input: by the names of the inputs, or else in the order of"
            " the names."
        ),
        show_default="the example inputs",
    ),
]
