"""``pathspace equalise`` and ``fit``: rescaled models, for rounding and for small types."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

import pathspace as ps

from ...errors import InputError
from ...files.writing import delivering, existing_file, expect_outputs, expect_suffix
from ..errors import FAILED
from ..options import (
    CalibrationOption,
    InputOption,
    JsonOption,
    SeedOption,
    TargetArgument,
    file_option,
)
from ..progress import deliver, loading

if TYPE_CHECKING:
    from ..target import Target

OutputOption = Annotated[str | None, file_option("Write the weights as safetensors.")]

Per = StrEnum("Per", ["tensor", "channel"])
Small = StrEnum("Small", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])


def _batches(file: str | None, loaded: Target) -> Any:
    if file is None:
        return loaded.kwargs or loaded.args
    import torch

    from ...files.tensor_files import read_saved
    from ...models.inputs import takes

    path = existing_file(file, "calibration", "save the inputs as .npy or .safetensors")
    expect_suffix(path, "calibration", (".npy", ".safetensors"))
    held = read_saved(path)
    if isinstance(held, torch.Tensor):
        return held
    by_name = takes(loaded.model, list(held))
    return held if by_name else tuple(held[name] for name in sorted(held))


def _save(model: Any, output: str | None) -> None:
    from safetensors.torch import save_model

    if output is not None:
        with delivering(output, ".safetensors") as file:
            save_model(model, str(file))


def equalise(
    target: TargetArgument,
    inputs: InputOption = None,
    bits: Annotated[int, typer.Option(help="Bits of each weight.")] = 8,
    per: Annotated[
        Per,
        typer.Option(help="One quantisation step for each tensor, or for each output channel."),
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
    expect_outputs("equalise", output, (".safetensors",), json)
    done = []
    with loading(target, inputs, "Tracing and equalising", seed=seed, train=False) as loaded:
        batches = _batches(calibration, loaded)
        steps = {"batch norms folded": ps.fold_norms} if fold else {}
        steps |= {"clips lifted": ps.lift_clips} if lift else {}
        for word, change in steps.items():
            try:
                loaded = loaded.of(loaded.call(change))
                done.append(word)
            except InputError:
                # nothing of the kind is there
                continue
        graph = loaded.call(ps.trace)
        found = ps.equalise(loaded.model, graph, bits, per.value, batches)
    certificate = found.gauges[0].certificate
    facts = {
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
    _save(found.model, output)
    deliver(facts, json, f"{found} ({scales})", output)


def fit(
    target: TargetArgument,
    inputs: InputOption = None,
    dtype: Annotated[Small, typer.Option(help="The data type to fit.")] = Small.float16,
    headroom: Annotated[
        float,
        typer.Option(help="Safety factor between the largest values and the limit of the type."),
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
    expect_outputs("fit", output, (".safetensors",), json)
    with loading(target, inputs, "Tracing and fitting", seed=seed, train=False) as loaded:
        import torch

        batches = _batches(calibration, loaded)
        found = ps.fit_dtype(loaded.model, batches, getattr(torch, dtype.value), headroom)
    facts = {
        "dtype": dtype.value,
        "fitted_before": found.fitted_before,
        "fits": found.fits,
        "error": {"before": found.error_before, "after": found.error},
        "table": [asdict(row) for row in found.table],
    }
    _save(found.model, output)
    deliver(facts, json, found, output)
    raise typer.Exit(0 if found.fits else FAILED)


COMMANDS = (equalise, fit)
