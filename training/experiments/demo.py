"""``pathspace demo``: four certificates, four files of masks, and one fair race between optimizers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pathspace as ps
from pathspace.files import make_folder, replacing
from pathspace.training.experiments.experiment import Comparison, Plan, compare
from pathspace.training.experiments.models import loop_rnn, mlp, residual_cnn, stacked_rnn
from pathspace.training.experiments.plots import draw_comparison, save_figure
from pathspace.training.experiments.results import difference_sentence, results_table, write_tables
from pathspace.training.experiments.tasks import load_task
from pathspace.training.progress import run_progress
from pathspace.training.threads import one_thread

Builder = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]

MODELS: tuple[tuple[str, Builder], ...] = (
    ("MLP, biases", mlp),
    ("residual CNN", residual_cnn),
    ("stacked RNN", stacked_rnn),
    ("looped RNN", loop_rnn),
)
MARKS = {True: "[green]holds[/]", False: "[red]fails[/]", None: "[yellow]n/a[/]"}


def run_demo(
    out: str | os.PathLike[str],
    *,
    epochs: int = 60,
    seeds: Sequence[int] = (0, 1, 2),
    rates: Sequence[float] | None = None,
    hidden: int = 100,
    console: Console | None = None,
) -> bool:
    """Verify four models, write their masks, train with SGD and G-SGD, and say where everything is.

    Args:
        out: folder for everything that is written; made if it is not there.
        epochs: epochs of each training run.
        seeds: seeds of the training runs.
        rates: learning rates to choose from; ``None`` takes those of
            :class:`pathspace.training.experiments.experiment.Plan`.
        hidden: hidden units of the trained RNN.
        console: where to print.

    Returns:
        Whether every theorem holds for every model.

    Raises:
        InputError: the folder cannot be made or written.
    """
    started = time.perf_counter()
    console = console or Console()
    folder = make_folder(out)
    task = load_task("digits-rows", hidden=hidden)
    plan = Plan(task, seeds=tuple(seeds), epochs=epochs)
    if rates is not None:
        plan = Plan(task, seeds=tuple(seeds), epochs=epochs, rates=tuple(rates))
    with one_thread():
        console.rule("[bold]1. Four models, their path spaces and the theorems", align="left")
        holds = verify_models(folder, console)
        console.print()
        console.rule("[bold]2. Training in path space", align="left")
        console.print(f"{task.description}.", highlight=False)
        console.print(
            "A ReLU RNN learns them with SGD and with G-SGD. Same budget and seeds for all; each picks its "
            "learning rate on the validation split; the test split is looked at once, at the end.\n"
        )
        with run_progress(console, task, plan.size) as begin:
            comparison = compare(plan, begin)
    _report(comparison, folder, console)
    console.print()
    console.rule("[bold]3. What there is now, and what to type next", align="left")
    _farewell(folder, console, time.perf_counter() - started)
    return holds


def verify_models(folder: Path, console: Console) -> bool:
    """Verify the four models, write masks and certificates, and print one table.

    Args:
        folder: gets ``masks/NAME.safetensors`` and ``certificates/NAME.json``.
        console: where to print.

    Returns:
        Whether everything holds.
    """
    masks, certificates = make_folder(folder / "masks"), make_folder(folder / "certificates")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column("model")
    for header in ("weights", "units", "dim", "rank", "Thm 1", "Thm 2", "Thm 3", "change", "s"):
        table.add_column(header, justify="right")
    everything = True
    with console.status("") as status:
        for title, build in MODELS:
            status.update(f"Verifying {title}")
            model, inputs = build()
            certificate = ps.verify(model, *inputs)
            everything &= certificate.holds
            table.add_row(title, *_row(certificate.to_dict()))
            ps.save_masks(ps.trace(model, *inputs).skeleton(), masks / f"{build.__name__}.safetensors")
            with replacing(certificates / f"{build.__name__}.json") as temporary:
                temporary.write_text(certificate.to_json() + "\n", encoding="utf-8")
    table.caption = (
        "dim = weights - units; rank: exact rank of the path matrix. Thm 1: every path follows from basis "
        "paths; Thm 2: activations follow from their values; Thm 3: they are dim in number and independent. "
        "change: how far a rescaling changes the outputs, relatively; in theory not at all. s: seconds."
    )
    console.print(table)
    return everything


def _row(record: dict[str, Any]) -> list[str]:
    rank = record["rank"]
    return [
        *(f"{record[key]:,}" for key in ("weights", "units", "dimension")),
        "–" if rank is None else f"{rank:,}",
        *(MARKS[record[f"theorem{number}"]["holds"]] for number in (1, 2, 3)),
        f"{record['invariance']['max_relative_violation']:.0e}",
        f"{record['seconds']:.1f}",
    ]


def _report(comparison: Comparison, folder: Path, console: Console) -> None:
    console.print(results_table(comparison))
    default, unit, path_space = comparison.verdicts
    # The start, the optimizer, and both together: whoever reads only the last could take one for the other.
    for first, second in ((unit, default), (path_space, unit), (path_space, default)):
        console.print(difference_sentence(comparison, first, second), highlight=False)
    write_tables(comparison, folder)
    save_figure(draw_comparison(comparison), folder / "learning_curves")


def _farewell(folder: Path, console: Console, seconds: float) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, meaning in (
        ("learning_curves.png, .svg", "the curves, and what each learning rate led to"),
        ("comparison.csv, runs.csv, epochs.csv", "the numbers: per arm, per run, per epoch"),
        ("masks/*.safetensors", "which weights are the skeleton"),
        ("certificates/*.json", "the theorems with their evidence"),
    ):
        table.add_row(f"{folder / name}", meaning)
    console.print(table)
    console.print(f"\nAll of it took {seconds:.0f} seconds. Next:", highlight=False)
    for command in (
        "pathspace verify pathspace.training.experiments.models:residual_cnn",
        "pathspace masks pathspace.training.experiments.models:stacked_rnn -o masks.safetensors",
        "pathspace train digits-rows --optimizer gsgd",
    ):
        console.print(f"  [bold]{command}[/]", highlight=False, soft_wrap=True)
