"""``pathspace verify``, ``check``, ``explain``, ``draw``, ``masks`` and ``spaces``."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from json import dumps, loads
from typing import Annotated, Any

import typer
from rich.markup import escape

import pathspace as ps

from ...errors import InputError
from ...files.writing import STDOUT, delivering, existing_file, expect_outputs, write_text
from ..errors import FAILED, NOT_COMPARED, say
from ..options import (
    InputOption,
    JsonOption,
    NormEps,
    NormEpsOption,
    RuleOption,
    SeedOption,
    SkeletonRule,
    TargetArgument,
    TrainOption,
    argument,
    file_option,
)
from ..progress import deliver, loading, show_progress, tell

# lines on what a checker has not seen
UNSEEN = 8
ClaimName = StrEnum("ClaimName", {"printed_skeleton": "printed-skeleton"})
Level = StrEnum("Level", ["auto", "block", "scalar"])


def verify(
    target: TargetArgument,
    inputs: InputOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
    rule: RuleOption = SkeletonRule.modulo,
    norm_eps: NormEpsOption = NormEps.ignore,
    train: TrainOption = None,
    claim: Annotated[
        ClaimName | None,
        typer.Option(help="Test this claim from the literature instead.", show_default=False),
    ] = None,
    proof: Annotated[
        str | None,
        file_option("Also write the proof of Theorem 3 for 'pathspace check'.", "--proof"),
    ] = None,
    upper_bound: Annotated[
        bool,
        typer.Option("--upper-bound", help="Also bound the number of units, by a randomised test."),
    ] = False,
    spaces: Annotated[
        bool,
        typer.Option("--spaces", help="Also list the spaces of features, and let groups act."),
    ] = False,
) -> None:
    """Verify Theorems 1-3 and the rescaling invariance of a model, and print a certificate.

    [bold]pathspace verify net.py:Net --input 2x3x32x32[/]
    [bold]pathspace verify mypackage.models:build --json certificate.json[/]
    [bold]pathspace verify language.py:model --input 2x16:int64 --json - | jq .dimension[/]
    [bold]pathspace verify net.py:Net --input 8x3 --claim printed-skeleton[/]
    [bold]pathspace verify language.py:model --input 2x16:int64 --spaces --proof proof.json[/]

    The model is verified in its current mode, unless you pass --train or --eval.

    Exit codes: 0 all statements hold, 1 a statement fails, 2 bad input.
    """
    from ...evidence.claims import printed_skeleton

    expect_outputs("verify", json, (), proof)
    result: Any
    document = ""
    with loading(target, inputs, "Tracing and verifying", seed=seed, train=train) as loaded:
        found = loaded.call(ps.spaces) if spaces else None
        if claim is not None or proof is not None:
            graph = loaded.call(ps.trace, norm_eps=norm_eps.value)
            skeleton = graph.skeleton(rule=rule.value, seed=seed)
        if claim is not None:
            result = printed_skeleton(skeleton)
        else:
            options = {"norm_eps": norm_eps.value, "rule": rule.value, "upper_bound": upper_bound}
            result = loaded.call(ps.verify, seed=seed, spaces=found, **options)
        if proof is not None:
            document = dumps(ps.proof(skeleton, target, found))
    write_text(result.to_json(), json)
    write_text(document, proof)
    if json != STDOUT:
        tell(result, proof == STDOUT)
        training = [part for part in loaded.model.modules() if part.training]
        if any(hasattr(part, "running_mean") or "Dropout" in str(type(part)) for part in training):
            say("Note", "yellow", "Verified in training mode; --eval verifies evaluation mode.")
    failed = not result.holds if claim is None else result.verdict is False
    raise typer.Exit(FAILED if failed else 0)


def check(
    file: Annotated[str, argument("FILE", "A proof written by 'pathspace verify --proof'.")],
    target: Annotated[
        str | None, argument("TARGET", "Also compare with this model, by running it.")
    ] = None,
    inputs: InputOption = None,
    seed: SeedOption = 0,
    train: TrainOption = None,
) -> None:
    """Check a proof with an independent checker, which shares no code with the library.

    [bold]pathspace check proof.json[/]
    [bold]pathspace check proof.json net.py:Net --input 8x3[/]

    Exit codes: 0 accepted, 1 rejected, 2 bad input, 3 the outputs could not be compared.
    """
    path = existing_file(file, "check", "write one with 'pathspace verify TARGET --proof FILE'")
    document: Any = path
    try:
        # (what cannot be read or is nested too deeply, the judge rejects itself)
        with suppress(OSError, RecursionError):
            document = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"check found no JSON in {file!r}; give a file of 'pathspace verify --proof'."
        ) from error
    if target is None:
        with show_progress("Judging", file):
            judgement = ps.check(document)
    else:
        with loading(target, inputs, "Judging", seed=seed, train=train) as loaded:
            tensors = dict(loaded.model.named_parameters(remove_duplicate=False))
            judgement = ps.check(document, tensors, loaded.model, loaded.args, loaded.kwargs)
    proven = (
        f"{judgement.weights:,} weights, {judgement.units:,} units,"
        f" dimension {judgement.dimension or 0:,}"
    )
    if judgement.spaces is not None:
        proven += f", changes of basis of dimension {judgement.spaces:,}"
    reason = escape(judgement.reason)
    if not judgement.accepted:
        code, words = FAILED, f"[red]Rejected[/]: {reason}."
    elif target is None or judgement.compared == "outputs":
        # (nothing was compared on purpose, or everything)
        code, words = 0, f"[green]Accepted[/]: {proven}; compared with {judgement.compared}."
    else:
        code = NOT_COMPARED
        words = f"[yellow]Not compared[/]: {reason}. By itself the proof holds: {proven}."
    tell(words, markup=True)
    for entry in judgement.unseen[:UNSEEN]:
        tell(f"Not seen: {entry}.")
    if (more := len(judgement.unseen) - UNSEEN) > 0:
        tell(f"Not seen: and {more:,} more.")
    raise typer.Exit(code)


def explain(
    target: TargetArgument,
    inputs: InputOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
    norm_eps: NormEpsOption = NormEps.ignore,
    train: TrainOption = None,
) -> None:
    """List every parameter as in path space, pinned or unused, with a reason for each fixed scale.

    [bold]pathspace explain net.py:Net --input 2x3x32x32[/]

    Exit codes: 0 done, 2 bad input.
    """
    expect_outputs("explain", json)
    with loading(target, inputs, "Tracing and explaining", seed=seed, train=train) as loaded:
        explanation = loaded.call(ps.explain, norm_eps=norm_eps.value)
        facts = explanation.to_dict()
    deliver(facts, json, explanation)


def draw(
    target: TargetArgument,
    output: Annotated[str, file_option("The .svg, .png or .pdf to write; - prints an SVG.")],
    inputs: InputOption = None,
    level: Annotated[
        Level, typer.Option(help="Draw groups of units, or single weights (auto: up to 150).")
    ] = Level.auto,
    path: Annotated[
        int | None,
        typer.Option(help="Number of the basis path to highlight.", show_default="the longest"),
    ] = None,
    seed: SeedOption = 0,
    rule: RuleOption = SkeletonRule.modulo,
    norm_eps: NormEpsOption = NormEps.ignore,
    train: TrainOption = None,
) -> None:
    """Draw the reduction graph of a model with its skeleton in red.

    [bold]pathspace draw net.py:Net --input 8x3 -o graph.svg[/]

    Exit codes: 0 written, 2 bad input; an existing file is replaced only by a complete new file.
    """
    expect_outputs("draw", output, (".svg", ".png", ".pdf"))
    with (
        delivering(output, ".svg") as file,
        loading(target, inputs, "Tracing and drawing", seed=seed, train=train) as loaded,
    ):
        graph = loaded.call(ps.trace, norm_eps=norm_eps.value)
        ps.draw(graph.skeleton(rule=rule.value, seed=seed), file, level.value, path)
    tell(f"Wrote {output}", output == STDOUT)


def masks(
    target: TargetArgument,
    output: Annotated[str, file_option("The safetensors file to write; - for standard output.")],
    inputs: InputOption = None,
    seed: SeedOption = 0,
    rule: RuleOption = SkeletonRule.modulo,
    norm_eps: NormEpsOption = NormEps.ignore,
    train: TrainOption = None,
) -> None:
    """Write the skeleton masks of a model: the weights of the entering and of the leaving tree.

    [bold]pathspace masks net.py:Net --input 2x3x32x32 -o masks.safetensors[/]

    Exit codes: 0 written, 2 bad input; an existing file is replaced only by a complete new file.
    """
    expect_outputs("masks", output, (".safetensors",))
    stage = "Tracing and choosing the skeleton of"
    with (
        delivering(output, ".safetensors") as file,
        loading(target, inputs, stage, seed=seed, train=train) as loaded,
    ):
        graph = loaded.call(ps.trace, norm_eps=norm_eps.value)
        skeleton = graph.skeleton(rule=rule.value, seed=seed)
        ps.save_masks(skeleton, file)
    tell(skeleton, output == STDOUT)
    tell(f"Wrote {output}", output == STDOUT)


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


COMMANDS = (verify, check, explain, draw, masks, spaces)
