"""The command ``pathspace report``: one HTML page about a model."""

from __future__ import annotations

from typing import Annotated

import typer

from pathspace.cli.options import (
    InputOption,
    JsonOption,
    NormEps,
    NormEpsOption,
    RuleOption,
    SeedOption,
    SkeletonRule,
    TargetArgument,
    TrainOption,
)

from ..shared.options import BatchesOption, CheckpointOption, DataOption, LossOption


def report(
    target: TargetArgument,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The .html to write; - prints it.",
            show_default=False,
        ),
    ],
    inputs: InputOption = None,
    checkpoint: CheckpointOption = None,
    data: DataOption = None,
    loss: LossOption = None,
    batches: BatchesOption = 4,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="TARGET|FILE",
            help=(
                "Compare with a second model: another target, or another checkpoint of the same"
                " target."
            ),
            show_default=False,
        ),
    ] = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
    rule: RuleOption = SkeletonRule.modulo,
    norm_eps: NormEpsOption = NormEps.ignore,
    train: TrainOption = None,
) -> None:
    """Write one page about a model: graph, certificate, pinned operations, path values,
    chain, signal, degeneracy.

    The page is self-contained and opens from disk. More samples give better figures: give at least
    a few samples. Without data and a loss gradients are those of random classes.

    [bold]pathspace report net.py:Net --input 8x3x32x32 -o report.html[/] [bold]pathspace report
    net.py:Net --data net.py:loader --checkpoint after.pt --against before.pt -o report.html[/]

    Exit codes: 0 written, whatever the certificate says; 2 bad input; an existing file stays whole
    unless the new one is complete.
    """
    from pathspace.cli.progress import deliver, show_progress
    from pathspace.cli.target import load_target
    from pathspace.files.writing import delivering, expect_outputs

    expect_outputs("report", output, (".html", ".htm"), json)
    models = [(target, checkpoint)]
    if against is not None:
        models.append((against, None) if ":" in against else (target, against))
    reports = []
    with show_progress("Loading", target) as status:
        from .page import Report
        from .page import report as look
        from .versus import Versus, versus

        for number, (name, weights) in enumerate(models):
            loaded = load_target(
                name, inputs or (), seed=seed, train=train, need_inputs=data is None
            )
            start, part = number / len(models), 1 / len(models)
            one: Report = look(
                loaded.model,
                *loaded.args,
                kwargs=loaded.kwargs,
                checkpoint=weights,
                data=data,
                loss=loss,
                batches=batches,
                rule=rule.value,
                norm_eps=norm_eps.value,
                seed=seed,
                progress=lambda doing, share, a=start, b=part: status(f"{doing}:", a + b * share),  # type: ignore[misc]
            )
            reports.append(one)
    found: Report | Versus = reports[0]
    told = [reports[0].sentences["model"], reports[0].sentences["certificate"]]
    if len(models) > 1:
        first, second = (weights or name for name, weights in models)
        found = versus(reports[0], reports[1], names=(first, second))
        told = found.sentences
    with delivering(output, ".html") as page:
        found.save(page)
    deliver(found.to_dict(), json, "\n".join(told), output)
