"""The commands ``pathspace diagnose``, signal and Markov chain on a batch,
and ``pathspace report``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pathspace.cli.options import InputOption, JsonOption, SeedOption, TargetArgument, TrainOption

from .shared.options import BatchesOption, CheckpointOption, DataOption, LossOption

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from .chain.chain import MarkovChain
    from .chain.efficiency import ChainRecord
    from .chain.first_steps import FirstSteps
    from .report.diagnosis import Diagnosis
    from .shared.tables import Table
    from .signal.signal import LayerSignal


def register(app: typer.Typer) -> None:
    """Add the commands of this package to the command line.

    Args:
        app: the application of ``pathspace``, which finds this function by its entry point.

    Example:
        >>> app = typer.Typer()
        >>> register(app)
        >>> [command.callback.__name__ for command in app.registered_commands]
        ['diagnose', 'report']
    """
    from .report.report_command import report

    app.command()(diagnose)
    app.command()(report)


def diagnose(
    target: TargetArgument,
    inputs: InputOption = None,
    checkpoint: CheckpointOption = None,
    data: DataOption = None,
    loss: LossOption = None,
    batches: BatchesOption = 4,
    json: JsonOption = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="PATTERN",
            help="Only layers with matching names, such as 'layer4.*'.",
            show_default=False,
        ),
    ] = None,
    seed: SeedOption = 0,
    train: TrainOption = None,
) -> None:
    """Measure signals and gradients at every layer on a batch, and the cosine of
    residual branches with descent.

    Gains are Var[vJ] / Var[v] over random v: of the layer itself, beside what theory says, and from
    the output back. Without data the loss is that of random classes where the outputs are scores,
    and the mean square otherwise: what it says is then about the chain, not about a task.

    [bold]pathspace diagnose net.py:Net --checkpoint net.safetensors --data
    net.py:loader --loss cross_entropy[/]

    Exit codes: 0 done, also where no chain was found; 2 bad input.
    """
    from collections import Counter
    from json import dumps

    from rich.console import Console

    from pathspace.cli.progress import show_progress, tell
    from pathspace.cli.target import load_target
    from pathspace.files.writing import expect_outputs, write_text

    expect_outputs("diagnose", json)
    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), seed=seed, train=train, need_inputs=data is None)
        from .report.diagnosis import diagnose as look
        from .shared.tables import plain

        what: dict[str, Any] = {
            "checkpoint": checkpoint,
            "data": data,
            "loss": loss,
            "batches": batches,
        }
        what |= {"kwargs": loaded.kwargs, "names": layers, "seed": seed, "progress": status}
        found = look(loaded.model, *loaded.args, **what)
        table, chain, record = found.signal, found.chain, found.record
    write_text(dumps(plain(found.to_dict()), indent=2, allow_nan=False), json)
    if json != "-":
        console = Console()
        console.print(_signal(table))
        tell(chain.sentence())
        if record is not None:
            console.print(_table(chain, record, found.started))
            tell(_summary(found, record))
            tell(f"Gradients are those of {found.subject.loss.says}.")
        for alarm in found.alarms:
            cause = f", from {alarm.because}" if alarm.because else ""
            advice = "" if alarm.because else f" {alarm.advice}"
            tell(f"Alarm ({alarm.kind}{cause}): {alarm.text}{advice}")
        if not found.alarms:
            tell("No problem was found in one pass.")
        reasons = Counter(f"{item.operation}: {item.reason}" for item in chain.dismissed)
        for reason, count in reasons.most_common():
            tell(f"  {count} x {reason}")


def _summary(found: Diagnosis, record: ChainRecord) -> str:
    """One line about the whole chain; a node whose direction or gradient is zero has no cosine."""
    from .report.sentences import chain as sentence
    from .report.sentences import started
    from .shared.tables import plain
    from .shared.wording import plural

    more = {} if found.started is None else found.started.to_dict()
    facts = plain({**record.to_dict(), **more})
    silent = sum(node["cosine_mean"] is None for node in facts["nodes"])
    if silent == len(found.chain):
        return sentence(facts)
    text = (
        f"efficiency {record.mean_efficiency:+.4f}; every cosine positive for"
        f" {record.convex_share:.0%} of {plural(record.samples, 'sample')};"
        f" {len(found.chain.dismissed)} other additions and joins"
    )
    if silent:
        text += (
            f"; {plural(silent, 'node')} with no cosine, the direction or the gradient being zero"
            f" there{started(facts)}"
        )
    return text


def _table(chain: MarkovChain, record: ChainRecord, started: FirstSteps | None) -> RichTable:
    from rich.markup import escape

    after = () if started is None else ("first steps",)
    headings = ("cosine", "5 %", "95 %", "|z|/|x|", "gauge", *after)
    table = _columns("node", [node.name for node in chain.nodes], 30, headings)
    for node, row in zip(chain.nodes, record.to_dict()["nodes"], strict=True):
        values = (row["cosine_mean"], row["cosine_q05"], row["cosine_q95"])
        cells = ["" if math.isnan(value) else f"{value:+.3f}" for value in values]
        cells += [f"{row['direction_over_stream']:.3g}", f"{row['gauge']:+.2e}"]
        if started is not None:
            first = started.cosines.get(node.name, math.nan)
            cells.append("" if math.isnan(first) else f"{first:+.3f}")
        table.add_row(escape(node.name), node.kind, *cells)
    return table


def _signal(table: Table[LayerSignal]) -> RichTable:
    from rich.markup import escape

    def number(value: Any) -> str:
        value = getattr(value, "value", value)
        return "" if value is None else f"{value:.3g}"

    headings = ("variance", "gain", "theory", "from output", "dead")
    result = _columns("layer", [row.layer for row in table], 24, headings)
    result.title = "Signal by depth"
    for row in table:
        dead = "" if not row.dead else f"{row.dead} of {row.units}"
        cells = (row.variance, row.vjp_gain, row.expected_gain, row.output_gain)
        result.add_row(escape(row.layer), row.kind, *map(number, cells), dead)
    return result


def _columns(first: str, names: Sequence[str], room: int, headings: Iterable[str]) -> RichTable:
    """An empty table of named rows of some kinds, and of numbers; long names are folded only
    beyond a width.
    """
    from rich import box
    from rich.table import Table as RichTable

    table = RichTable(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    longest = max(map(len, names), default=0)
    table.add_column(first, overflow="fold", min_width=min(longest, room))
    table.add_column("kind", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


__all__ = ["register"]
