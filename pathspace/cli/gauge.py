"""``pathspace equalise`` and ``pathspace fit``: rescaled models, for
rounding and for small types.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated, Any, TextIO

import typer

from .options import InputOption, JsonOption, SeedOption, TargetArgument
from .progress import deliver, show_progress, tell

OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the weights as safetensors.",
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


class Per(StrEnum):
    """What shares one step."""

    tensor = "tensor"
    channel = "channel"


class Small(StrEnum):
    """Floating point types to fit."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e4m3fn = "float8_e4m3fn"
    float8_e5m2 = "float8_e5m2"


def _inputs(file: str | None, model: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Calibration batches."""
    if file is None:
        args, kwargs = given
        return kwargs if kwargs else args
    import numpy as np
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from ..errors import InputError
    from ..files.writing import existing_file
    from ..models.inputs import takes

    path = existing_file(file, "calibration", "save the inputs as .npy or .safetensors")
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".safetensors":
            held = load_file(path)
            return held if takes(model, list(held)) else tuple(held[name] for name in sorted(held))
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise InputError(
            f"{file!r} cannot be read ({error}), expected tensors; check the file."
        ) from error
    raise InputError(
        f"{file!r} is neither .npy nor .safetensors, expected one of these; save the inputs in one"
        " of these formats."
    )


def _write(model: Any, output: str | None, stdout: TextIO) -> None:
    if output is None:
        return
    from safetensors.torch import save_model

    from ..files.writing import delivering

    with delivering(output, ".safetensors", stdout) as file:
        save_model(model, str(file))


def _tell_written(output: str | None, json: str | None) -> None:
    if output is not None and json != "-":
        tell(f"Wrote {output}", aside=output == "-")


def equalise(
    target: TargetArgument,
    inputs: InputOption = None,
    bits: Annotated[int, typer.Option("--bits", help="Bits of each weight.")] = 8,
    per: Annotated[
        Per,
        typer.Option(
            "--per", help="One quantisation step for each tensor, or for each output channel."
        ),
    ] = Per.tensor,
    calibration: CalibrationOption = None,
    fold: Annotated[
        bool, typer.Option("--fold/--keep-norms", help="Fold batch norms first, if there are any.")
    ] = True,
    lift: Annotated[
        bool,
        typer.Option("--lift/--keep-clips", help="Rescale the bounds of ReLU6 with the gauge."),
    ] = True,
    output: OutputOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Rescale a model so that rounded weights give the least noise; the function does not change.

    [bold]pathspace equalise net.py:Net --input 8x3x32x32 --bits 6 -o net.safetensors[/]

    Exit codes: 0 success (also if no gauge is better), 2 bad input.
    """
    from ..files.writing import STDOUT, expect_outputs
    from .target import load_target

    expect_outputs("equalise", output, (".safetensors",), json)
    stdout = sys.stdout
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed, train=False)
        status("Tracing and equalising")
        import pathspace as ps

        model = loaded.model
        batches = _inputs(calibration, model, (loaded.args, loaded.kwargs))
        steps = {"batch norms folded": ps.fold_norms} if fold else {}
        steps |= {"clips lifted": ps.lift_clips} if lift else {}
        done = []
        for word, change in steps.items():
            try:
                model = change(model, *loaded.args, kwargs=loaded.kwargs)
                done.append(word)
            except ps.InputError:
                # nothing of the kind is there
                continue
        graph = ps.trace(model, *loaded.args, kwargs=loaded.kwargs)
        found = ps.equalise(model, graph, bits, per.value, batches)
        _write(found.model, output, stdout)
    certificate = found.gauges[0].certificate
    result = {
        "bits": bits,
        "per": per.value,
        "changed": done,
        "units": graph.num_units,
        "before": found.before,
        "after": found.after,
        "helped": found.helped,
        "predicted": {
            "before": certificate.before,
            "after": certificate.after,
            "at_least": certificate.bound,
        },
    }
    scales = ", ".join([*done, f"{graph.num_units:,} free scales"])
    deliver(result, json, f"{found} ({scales})", output == STDOUT)
    _tell_written(output, json)


def fit(
    target: TargetArgument,
    inputs: InputOption = None,
    dtype: Annotated[Small, typer.Option("--dtype", help="The data type to fit.")] = Small.float16,
    headroom: Annotated[
        float,
        typer.Option(
            "--headroom",
            help="Safety factor between the largest values and the limit of the data type.",
        ),
    ] = 4.0,
    calibration: CalibrationOption = None,
    output: OutputOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Rescale a model so that activations and weights are within the range of a smaller data type.

    [bold]pathspace fit net.py:Net --input 8x3x32x32 --dtype float16 -o net.safetensors[/]

    Exit codes: 0 everything fits, 1 values with a fixed scale do not fit, 2 bad input.
    """
    from dataclasses import asdict

    from ..files.writing import STDOUT, expect_outputs
    from .errors import FAILED
    from .target import load_target

    expect_outputs("fit", output, (".safetensors",), json)
    stdout = sys.stdout
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed, train=False)
        status("Tracing and fitting")
        import torch

        from ..fitting.dtype_range import fit_dtype

        batches = _inputs(calibration, loaded.model, (loaded.args, loaded.kwargs))
        found = fit_dtype(loaded.model, batches, getattr(torch, dtype.value), headroom)
        _write(found.model, output, stdout)
    facts = {
        "dtype": dtype.value,
        "fitted_before": found.fitted_before,
        "fits": found.fits,
        "error": {"before": found.error_before, "after": found.error},
        "table": [asdict(row) for row in found.table],
    }
    deliver(facts, json, found, output == STDOUT)
    _tell_written(output, json)
    raise typer.Exit(0 if found.fits else FAILED)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(equalise)
    app.command()(fit)
