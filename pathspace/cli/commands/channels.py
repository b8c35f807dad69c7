"""Commands on channels: ``pathspace prune``, ``match``, ``compare`` and ``smooth``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

import pathspace as ps

from ...errors import InputError, first_line, on_one_line
from ...files.writing import delivering, expect_outputs
from ..errors import FAILED, NOT_COMPARED
from ..options import (
    InputOption,
    JsonOption,
    SeedOption,
    TargetArgument,
    argument,
    file_option,
)
from ..progress import deliver, loading

if TYPE_CHECKING:
    from ..target import Target

First = Annotated[str, argument("A")]
Second = Annotated[str, argument("B", "Weights of the other model.")]

By = StrEnum("By", ["weights", "paths"])
MatchBy = StrEnum("MatchBy", ["weights", "activations"])
Format = StrEnum("Format", ["llm-compressor", "awq", "smoothquant", "aimet"])


def _with_weights(loaded: Target, path: str) -> Target:
    from ...files.tensor_files import read_saved
    from ...models.copies import safe_deepcopy

    state, model = read_saved(path), safe_deepcopy(loaded.model)
    try:
        model.load_state_dict(state)
    except Exception as error:  # torch lists all tensors that do not fit
        raise InputError(
            f"The weights in {path!r} cannot be used: {on_one_line(str(error))}; give the state"
            " dictionary of a model of this architecture."
        ) from error
    return loaded.of(model)


def prune(
    target: TargetArgument,
    output: Annotated[str, file_option("File for the smaller module, written by torch.save.")],
    keep: Annotated[float, typer.Option(min=0, max=1, help="Share of the channels to keep.")] = 0.5,
    by: Annotated[
        By,
        typer.Option(help="Rank channels by weights of the model, or of the balanced one."),
    ] = By.weights,
    inputs: InputOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Remove channels, and write a smaller module that computes the same as the masked model.

    [bold]pathspace prune net.py:net --keep 0.5 -o smaller.pt[/]

    Exit codes: 0 written, 2 bad input.
    """
    import torch

    expect_outputs("prune", output, (".pt", ".pth"), json)
    with (
        delivering(output, ".pt") as file,
        loading(target, inputs, "Leaving out channels of", seed=seed) as loaded,
    ):
        groups = loaded.call(ps.channels)
        kept, small = groups.kept(keep, by.value), groups.remove(keep=keep, by=by.value)
        try:
            torch.save(small, file)
        except Exception as error:  # (pickle has no error of its own for all of it)
            raise InputError(
                f"prune found {type(small).__name__}, which torch.save cannot write"
                f" ({first_line(error)}), expected classes that can be imported by name; define"
                " the classes in a module, or call ps.channels(model, x).remove() in Python."
            ) from error
    before, after = (sum(p.numel() for p in model.parameters()) for model in (loaded.model, small))
    sizes = {group.name: len(group) for group in groups}
    facts = {
        "parameters_before": before,
        "parameters_after": after,
        "groups": {
            name: {"channels": sizes[name], "kept": numbers.tolist()}
            for name, numbers in kept.items()
        },
        "refused": groups.refused,
    }
    lines = [f"{name}: kept {len(kept[name])} of {sizes[name]} channels" for name in kept]
    lines += [
        f"{name}: kept all {sizes.get(name, 'channels')}, {reason}"
        for name, reason in groups.refused.items()
    ]
    lines.append(f"{before:,} parameters before, {after:,} after.")
    deliver(facts, json, "\n".join(lines), output)


def match(
    target: TargetArgument,
    first: First,
    second: Second,
    output: Annotated[
        str, file_option("File for checkpoint B with the channels in the order of A.")
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

    expect_outputs("match", output, (".safetensors",), json)
    with (
        delivering(output, ".safetensors") as file,
        loading(target, inputs, "Matching channels of", seed=seed) as loaded,
    ):
        one, two = (_with_weights(loaded, path) for path in (first, second))
        found = one.call(ps.channels).match(two.model, by.value, seed=seed)
        state = found.model.state_dict()
        save_file({name: tensor.clone() for name, tensor in state.items()}, file)
    facts = {
        "before": found.before,
        "after": found.after,
        "orders": {name: order.tolist() for name, order in found.orders.items()},
    }
    line = f"Distance of the weights {found.before:.4g} before, {found.after:.4g} after."
    deliver(facts, json, line, output)


def compare(
    target: TargetArgument, first: First, second: Second, inputs: InputOption = None,
    json: JsonOption = None, seed: SeedOption = 0,
) -> None:  # fmt: skip
    """Say whether two checkpoints are the same function, up to rescaling and the order of channels.

    [bold]pathspace compare net.py:net a.safetensors b.safetensors[/]

    Exit codes: 0 the same, 1 different, 2 bad input, 3 outputs agree, but no order was found.
    """
    expect_outputs("compare", json)
    with loading(target, inputs, "Comparing checkpoints of", seed=seed) as loaded:
        one, two = (_with_weights(loaded, path) for path in (first, second))
        found = ps.compare(one.model, two.model, one.call(ps.trace))
    names = ("same", "distance", "as_given", "rescaled", "differ", "outputs", "unsearched")
    deliver({name: getattr(found, name) for name in names}, json, str(found))
    raise typer.Exit({True: 0, False: FAILED, None: NOT_COMPARED}[found.same])


def smooth(
    target: TargetArgument,
    form: Annotated[
        Format, typer.Option("--format", help="Quantisation tool whose format to write.")
    ] = Format["llm-compressor"],
    inputs: InputOption = None,
    seed: SeedOption = 0,
) -> None:
    """Print which modules write and which read a set of units, in the format of quantisation tools.

    [bold]pathspace smooth transformers:path/to/config.json > recipe.yaml[/]
    [bold]pathspace smooth net.py:net --format aimet[/]

    Only pairs that are exact are printed. Exit codes: 0 printed, 2 bad input.
    """
    with loading(target, inputs, "Finding smoothing pairs of", seed=seed) as loaded:
        pairs = [pair for pair in ps.smoothing_pairs(loaded.call(ps.trace)) if pair.exact]
    print(ps.smoothing_recipe(pairs, form.value))


COMMANDS = (prune, match, compare, smooth)
