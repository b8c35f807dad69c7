"""The command line: ``pathspace verify``, ``check``, ``explain``, ``masks``, ``draw``,
and what other packages add.

Torch and the analysis are imported inside the commands, so that ``pathspace
--help`` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import entry_points, version
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from . import channels as channel_commands
from . import checkpoints as checkpoint_commands
from . import gauge as gauge_cli
from .errors import FAILED, NOT_COMPARED, ErrorSentenceGroup, guarded, say
from .options import (
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
from .progress import show_progress, tell

_GROUP = "pathspace.commands"

app = typer.Typer(
    name="pathspace",
    cls=ErrorSentenceGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Exit codes: 0 success; 1 a statement or a check fails; 2 bad input; 3 nothing could be"
        " compared; 130 interrupted."
    ),
)

# lines on what a checker has not seen
UNSEEN = 8


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pathspace {version('pathspace')}")
        raise typer.Exit


@app.callback()
def root(
    shown: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    # Taken from the command line before typer sees it, and declared here for --help only.
    debug: Annotated[
        bool, typer.Option("--debug", help="With any command: show the traceback of an error.")
    ] = False,
) -> None:
    """The path space of PyTorch models: symmetries, basis paths, certificates, masks.

    A TARGET is [bold]package.module:name[/] or [bold]path/to/file.py:name[/], or a model of a
    library: [bold]transformers:path/to/config.json[/], [bold]timm:NAME[/],
    [bold]torchvision:NAME[/]. The name is a torch.nn.Module, its class (called without arguments),
    or a function that returns a model or (model, example inputs), where the example is a tensor, a
    tuple of positional inputs, or a dict of keyword inputs.

    [bold]pathspace verify net.py:Net --input 2x3x32x32[/]
    [bold]pathspace masks net.py:Net --input 2x3x32x32 -o masks.safetensors[/]
    [bold]pathspace draw net.py:Net --input 2x3x32x32 -o graph.svg[/]

    pathspace COMMAND --help explains one command.
    """


class ClaimName(StrEnum):
    """Statements from the literature that can be tested on a model."""

    printed_skeleton = "printed-skeleton"
    hierarchical = "hierarchical"


@app.command()
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
        typer.Option(
            "--claim", help="Test this claim from the literature instead.", show_default=False
        ),
    ] = None,
    proof: Annotated[
        str | None,
        typer.Option(
            "--proof",
            metavar="FILE",
            help="Also write the proof of Theorem 3 for 'pathspace check'.",
            show_default=False,
        ),
    ] = None,
    upper_bound: Annotated[
        bool,
        typer.Option(
            "--upper-bound",
            help="Also compute an upper bound on the number of units, by a randomised test.",
        ),
    ] = False,
) -> None:
    """Verify Theorems 1-3 and the rescaling invariance of a model, and print a certificate.

    [bold]pathspace verify net.py:Net --input 2x3x32x32[/]
    [bold]pathspace verify mypackage.models:build --json certificate.json[/]
    [bold]pathspace verify language.py:model --input 2x16:int64 --json - | jq .dimension[/]
    [bold]pathspace verify net.py:Net --input 8x3 --claim printed-skeleton[/]

    The model is verified in its current mode, unless you pass --train or --eval.

    Exit codes: 0 all statements hold, 1 a statement fails, 2 bad input.
    """
    from json import dumps

    from torch import nn

    from ..files.writing import STDOUT, expect_outputs, write_text
    from .target import load_target

    expect_outputs("verify", json, (), proof)
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed, train=train, warn=False)
        status("Tracing and verifying")
        from ..evidence.proof import proof as write_proof
        from ..evidence.verify import verify as verify_model
        from ..tracing import trace

        skeleton: Any = None
        if claim is not None or proof is not None:
            graph = trace(loaded.model, *loaded.args, kwargs=loaded.kwargs, norm_eps=norm_eps.value)
            skeleton = graph.skeleton(rule=rule.value, seed=seed)
        result: Any
        if claim is not None:
            from ..evidence.claims import claim as try_claim

            result = try_claim(claim.value, skeleton)
            holds = result.verdict is not False
        else:
            result = verify_model(
                loaded.model,
                *loaded.args,
                kwargs=loaded.kwargs,
                norm_eps=norm_eps.value,
                seed=seed,
                rule=rule.value,
                upper_bound=upper_bound,
            )
            holds = result.holds
        text = result.to_json()
        document = "" if proof is None else dumps(write_proof(skeleton, target))
    write_text(text, json)
    write_text(document, proof)
    if json != STDOUT:
        Console(stderr=proof == STDOUT).print(result)
        kinds = nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd  # noqa: SLF001
        if any(isinstance(part, kinds) and part.training for part in loaded.model.modules()):
            say("Note", "yellow", "Verified in training mode; --eval verifies evaluation mode.")
    raise typer.Exit(0 if holds else FAILED)


@app.command()
def check(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A proof written by 'pathspace verify --proof'.")
    ],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Also compare with this model, by running it.",
            show_default=False,
        ),
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
    from contextlib import suppress
    from json import loads

    from ..checker import check as judge
    from ..errors import InputError
    from ..files.writing import existing_file
    from .target import load_target

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
    with show_progress("Judging", file):
        loaded = (
            None if target is None else load_target(target, inputs or (), seed=seed, train=train)
        )
        if loaded is None:
            judgement = judge(document)
        else:
            tensors = dict(loaded.model.named_parameters(remove_duplicate=False))
            judgement = judge(document, tensors, loaded.model, loaded.args, loaded.kwargs)
    console = Console()
    proven = (
        f"{judgement.weights:,} weights, {judgement.units:,} units,"
        f" dimension {judgement.dimension or 0:,}"
    )
    # (nothing was compared on purpose, or everything)
    seen = loaded is None or judgement.compared == "outputs"
    if not judgement.accepted:
        words = f"[red]Rejected[/]: {escape(judgement.reason)}."
    elif seen:
        words = f"[green]Accepted[/]: {proven}; compared with {judgement.compared}."
    else:
        words = (
            f"[yellow]Not compared[/]: {escape(judgement.reason)}. By itself the proof holds:"
            f" {proven}."
        )
    console.print(words, highlight=False, soft_wrap=True)
    few, more = judgement.unseen[:UNSEEN], len(judgement.unseen) - UNSEEN
    for entry in (*few, *([f"and {more:,} more"] if more > 0 else [])):
        console.print(f"Not seen: {escape(entry)}.", highlight=False, soft_wrap=True)
    raise typer.Exit(FAILED if not judgement.accepted else 0 if seen else NOT_COMPARED)


@app.command()
def explain(
    target: TargetArgument,
    inputs: InputOption = None,
    json: JsonOption = None,
    seed: SeedOption = 0,
    norm_eps: NormEpsOption = NormEps.ignore,
    train: TrainOption = None,
) -> None:
    """List every parameter as in path space, pinned or unused, with the
    reason for every fixed scale.

    [bold]pathspace explain net.py:Net --input 2x3x32x32[/]

    Exit codes: 0 done, 2 bad input.
    """
    from json import dumps

    from ..files.writing import STDOUT, expect_outputs, write_text
    from .target import load_target

    expect_outputs("explain", json)
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed, train=train)
        status("Tracing and explaining")
        from ..evidence.explain import account
        from ..tracing import trace

        graph = trace(loaded.model, *loaded.args, kwargs=loaded.kwargs, norm_eps=norm_eps.value)
        explanation = account(graph)
        text = dumps(explanation.to_dict())
    write_text(text, json)
    if json != STDOUT:
        Console().print(explanation)


class Level(StrEnum):
    """Level of detail of the drawing."""

    auto = "auto"
    block = "block"
    scalar = "scalar"


@app.command()
def draw(
    target: TargetArgument,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The .svg, .png or .pdf to write; - prints an SVG.",
            show_default=False,
        ),
    ],
    inputs: InputOption = None,
    level: Annotated[
        Level,
        typer.Option(
            "--level",
            help=(
                "Draw tensors and groups of units, or single weights (auto: for up to 150 weights)."
            ),
        ),
    ] = Level.auto,
    path: Annotated[
        int | None,
        typer.Option(
            "--path", help="Number of the basis path to highlight.", show_default="the longest"
        ),
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
    from ..files.writing import STDOUT, delivering, expect_outputs
    from .target import load_target

    expect_outputs("draw", output, (".svg", ".png", ".pdf"))
    stdout = sys.stdout
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed, train=train)
        status("Tracing and drawing")
        from ..paths.draw import draw as draw_graph
        from ..tracing import trace

        graph = trace(loaded.model, *loaded.args, kwargs=loaded.kwargs, norm_eps=norm_eps.value)
        skeleton = graph.skeleton(rule=rule.value, seed=seed)
        with delivering(output, ".svg", stdout) as file:
            draw_graph(skeleton, file, level.value, path)
    tell(f"Wrote {output}", output == STDOUT)


@app.command()
def masks(
    target: TargetArgument,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The safetensors file to write; - for standard output.",
            show_default=False,
        ),
    ],
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
    from ..files.writing import STDOUT, delivering, expect_outputs
    from .target import load_target

    expect_outputs("masks", output, (".safetensors",))
    stdout = sys.stdout
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed, train=train)
        status("Tracing and choosing the skeleton of")
        from ..paths.masks import save_masks
        from ..tracing import trace

        graph = trace(loaded.model, *loaded.args, kwargs=loaded.kwargs, norm_eps=norm_eps.value)
        skeleton = graph.skeleton(rule=rule.value, seed=seed)
        with delivering(output, ".safetensors", stdout) as file:
            save_masks(skeleton, file)
    Console(stderr=output == STDOUT).print(skeleton)
    tell(f"Wrote {output}", output == STDOUT)


checkpoint_commands.register(app)
gauge_cli.register(app)
channel_commands.register(app)


def load_extensions() -> None:
    """Let other packages add commands through the entry point group ``pathspace.commands``.

    Each entry point names a function ``register(app: typer.Typer) -> None``. One that fails is
    reported in a sentence, and the other commands go on working.
    """
    for point in sorted(entry_points(group=_GROUP), key=lambda point: point.name):
        try:
            point.load()(app)
        except Exception as error:
            if "--debug" in sys.argv:
                traceback.print_exception(error, file=sys.stderr)
            reason = f"{type(error).__name__} ({' '.join(str(error).split())})"
            say(
                "Warning",
                "yellow",
                f"The commands of {point.name} ({point.value}) are missing: {reason}.",
            )


def _names_own_command(words: Sequence[str]) -> bool:
    own = {
        command.name or getattr(command.callback, "__name__", "")
        for command in app.registered_commands
    }
    return (
        next((word for word in words if not word.startswith("-")), None) in own
        or "--version" in words
    )


def main() -> NoReturn:
    """Run the ``pathspace`` console command."""

    def run() -> int:
        # The packages behind other commands may be slow to import, and are not needed for our own.
        if not _names_own_command(sys.argv[1:]):
            load_extensions()
        app()
        return 0

    sys.exit(guarded(run, debug="--debug" in sys.argv))
