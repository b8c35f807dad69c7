"""Commands on channels: ``pathspace prune``, ``match``, ``compare`` and ``smooth``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import FAILED, NOT_COMPARED
from .options import InputOption, JsonOption, SeedOption, TargetArgument
from .progress import deliver, show_progress

if TYPE_CHECKING:
    from torch import nn

    from .target import Target

First = Annotated[
    str,
    typer.Argument(
        metavar="A", help="Weights: a file of safetensors or torch.save.", show_default=False
    ),
]
Second = Annotated[
    str, typer.Argument(metavar="B", help="Weights of the other model.", show_default=False)
]


class By(StrEnum):
    """How channels are ranked."""

    weights = "weights"
    paths = "paths"


class MatchBy(StrEnum):
    """How channels of two models are compared."""

    weights = "weights"
    activations = "activations"


class Format(StrEnum):
    """Tools that use smoothing pairs."""

    llm_compressor = "llm-compressor"
    awq = "awq"
    smoothquant = "smoothquant"
    aimet = "aimet"


def _with_weights(target: Target, path: str) -> nn.Module:
    """A copy of the target's model with the weights of a file."""
    from ..errors import InputError, first_line
    from ..files.tensor_files import read_saved
    from ..models.copies import safe_deepcopy

    state, model = read_saved(path), safe_deepcopy(target.model)
    try:
        model.load_state_dict(state)
    except Exception as error:
        why = _misfit(model.state_dict(), state) or first_line(error)
        raise InputError(
            f"The weights in {path!r} do not fit {type(model).__name__} ({why}); give the state"
            " dictionary of a model of this architecture."
        ) from error
    return model


def _misfit(own: Mapping[str, Any], state: Any) -> str:
    """The first tensor that a state lacks, has too many, or has in another shape."""
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    lacking = next((name for name in own if name not in state), None)
    if lacking is not None:
        return f"it lacks {lacking!r}"
    strange = next((name for name in state if name not in own), None)
    if strange is not None:
        return f"it has {strange!r}, which the model has not"
    shapes = (
        (name, *(tuple(getattr(held[name], "shape", ())) for held in (state, own))) for name in own
    )
    wrong = next((entry for entry in shapes if entry[1] != entry[2]), None)
    return f"{wrong[0]!r} has shape {wrong[1]}, expected {wrong[2]}" if wrong else ""


def _share(keep: float) -> float:
    if not 0 < keep <= 1:
        raise typer.BadParameter(f"{keep:g} is not a share above 0 and up to 1")
    return keep


def prune(
    target: TargetArgument,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File for the smaller module, written by torch.save.",
        ),
    ],
    keep: Annotated[
        float, typer.Option(callback=_share, help="Share of the channels to keep.")
    ] = 0.5,
    by: Annotated[
        By,
        typer.Option(
            help=(
                "Rank channels by the norm of their weights, in the model or in the balanced model."
            )
        ),
    ] = By.weights,
    inputs: InputOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Remove channels from a model, and write a smaller module that computes the
    same as the masked model.

    [bold]pathspace prune net.py:net --keep 0.5 -o smaller.pt[/]

    Exit codes: 0 written, 2 bad input.
    """
    from pickle import PicklingError

    import torch

    from ..errors import InputError, first_line
    from ..files.writing import STDOUT, delivering, expect_outputs
    from ..pruning.channels import channels
    from .target import load_target

    expect_outputs("prune", output, (".pt", ".pth"), json)
    stdout = sys.stdout
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed)
        status("Finding channels")
        groups = channels(loaded.model, *loaded.args, kwargs=loaded.kwargs)
        status("Leaving channels out")
        kept, small = groups.kept(keep, by.value), groups.remove(keep, by.value)
        with delivering(output, ".pt", stdout) as file:
            try:
                torch.save(small, file)
            except (PicklingError, AttributeError, TypeError) as error:
                raise InputError(
                    f"prune found {type(small).__name__}, which torch.save cannot write"
                    f" ({first_line(error)}), expected classes that can be imported by name; define"
                    " the classes in a module, or call ps.channels(model, x).remove() in Python."
                ) from error
    before, after = (sum(p.numel() for p in model.parameters()) for model in (loaded.model, small))
    facts = {
        "parameters_before": before,
        "parameters_after": after,
        "groups": {
            name: {"channels": len(groups[name]), "kept": numbers.tolist()}
            for name, numbers in kept.items()
        },
        "refused": groups.refused,
    }
    counts = {group.name: f" {len(group)}" for group in groups}
    lines = [
        f"{name}: kept {len(numbers)} of {len(groups[name])} channels"
        for name, numbers in kept.items()
    ]
    lines += [
        f"{name}: kept all{counts.get(name, '')}, {reason}"
        for name, reason in groups.refused.items()
    ]
    lines.append(f"{before:,} parameters before, {after:,} after. Wrote {output}")
    deliver(facts, json, "\n".join(lines), output == STDOUT)


def match(
    target: TargetArgument,
    first: First,
    second: Second,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File for checkpoint B with the channels in the order of A.",
        ),
    ],
    by: Annotated[
        MatchBy, typer.Option(help="Compare weights, or activations on the example inputs.")
    ] = MatchBy.weights,
    inputs: InputOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Permute the channels of B into the order of those of A; the function of B does not change.

    [bold]pathspace match net.py:net a.safetensors b.safetensors -o matched.safetensors[/]

    Exit codes: 0 written, 2 bad input.
    """
    from safetensors.torch import save_file

    from ..files.writing import STDOUT, delivering, expect_outputs
    from ..pruning.channels import channels
    from .target import load_target

    expect_outputs("match", output, (".safetensors",), json)
    stdout = sys.stdout
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed)
        one, two = (_with_weights(loaded, path) for path in (first, second))
        status("Matching channels")
        found = channels(one, *loaded.args, kwargs=loaded.kwargs).match(two, by.value, seed=seed)
        with delivering(output, ".safetensors", stdout) as file:
            save_file(
                {name: tensor.clone() for name, tensor in found.model.state_dict().items()}, file
            )
    facts = {
        "before": found.before,
        "after": found.after,
        "orders": {name: order.tolist() for name, order in found.orders.items()},
    }
    line = (
        f"Distance of the weights {found.before:.4g} before, {found.after:.4g} after. Wrote"
        f" {output}"
    )
    deliver(facts, json, line, output == STDOUT)


def compare(
    target: TargetArgument, first: First, second: Second, inputs: InputOption = None,
    json: JsonOption = None, seed: SeedOption = 0,
) -> None:  # fmt: skip
    """Say whether two checkpoints are the same function, up to rescaling and the order of channels.

    [bold]pathspace compare net.py:net a.safetensors b.safetensors[/]

    Exit codes: 0 the same, 1 different, 2 bad input, 3 outputs agree, but no order was found.
    """
    from ..files.writing import expect_outputs
    from ..pruning.compare import compare as compared
    from ..tracing import trace
    from .target import load_target

    expect_outputs("compare", json)
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed)
        one, two = (_with_weights(loaded, path) for path in (first, second))
        status("Comparing")
        found = compared(one, two, trace(one, *loaded.args, kwargs=loaded.kwargs))
    names = ("same", "distance", "as_given", "rescaled", "differ", "outputs", "unsearched")
    agree = "Outputs agree" if found.outputs is not None else "The models cannot be run"
    verdicts = {
        True: ("The same up to rescaling and order.", 0),
        False: ("Different: their outputs differ.", FAILED),
        None: (f"{agree}, but no order of channels makes the weights equal.", NOT_COMPARED),
    }
    verdict, code = verdicts[found.same]
    lines = [
        verdict,
        (
            f"Relative distance of the weights: {found.as_given:.3g} as given, {found.rescaled:.3g}"
            f" without scales, {found.distance:.3g} without scales and order."
        ),
        *(f"{name}: {far:.3g}" for name, far in list(found.differ.items())[:10]),
        *(f"Not searched: orders in {place}." for place in found.unsearched[:10]),
    ]
    deliver({name: getattr(found, name) for name in names}, json, "\n".join(lines))
    raise typer.Exit(code)


def smooth(
    target: TargetArgument,
    form: Annotated[
        Format, typer.Option("--format", help="Quantisation tool whose format to write.")
    ] = Format.llm_compressor,
    inputs: InputOption = None,
    seed: SeedOption = 0,
) -> None:
    """Print which modules write and which read a set of units, in the format of quantisation tools.

    [bold]pathspace smooth transformers:path/to/config.json > recipe.yaml[/]
    [bold]pathspace smooth net.py:net --format aimet[/]

    Only pairs that are exact are printed. Exit codes: 0 printed, 2 bad input.
    """
    from ..fitting.smoothing import smoothing_pairs, smoothing_recipe
    from ..tracing import trace
    from .target import load_target

    with show_progress("Tracing", target) as status:
        loaded = load_target(target, inputs or (), seed=seed)
        graph = trace(loaded.model, *loaded.args, kwargs=loaded.kwargs)
        status("Finding pairs")
        pairs = smoothing_pairs(graph)
    print(smoothing_recipe([pair for pair in pairs if pair.exact], form.value))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (prune, match, compare, smooth):
        app.command()(command)
