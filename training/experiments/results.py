"""The results of a comparison, as tables for people and for programs."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from pathspace.files import replacing
from pathspace.training.experiments.experiment import Comparison, Verdict


def results_table(comparison: Comparison) -> Table:
    """Return one row per arm: its chosen learning rate, validation and test metric, and what diverged."""
    plan, task = comparison.plan, comparison.plan.task
    table = Table(
        title=f"{task.name}: test {task.metric_name}, mean of {len(plan.seeds)} seeds with 95 % t-interval",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("arm")
    for header in ("lr", "validation", f"test {task.metric_name}", "failed runs"):
        table.add_column(header, justify="right")
    for verdict in comparison.verdicts:
        runs = len(plan.rates) * len(plan.seeds)
        table.add_row(
            verdict.arm.label,
            f"{verdict.lr:g}{edge_mark(comparison, verdict)}",
            format(verdict.valid.mean, task.metric_format) if verdict.valid.count else "–",
            verdict.test.show(task.metric_format),
            f"{verdict.failed} of {runs}",
        )
    rates = ", ".join(f"{rate:g}" for rate in plan.rates)
    table.caption = (
        f"Every arm: {plan.epochs} epoch{'s' * (plan.epochs != 1)}, batches of {plan.batch_size}, "
        f"seed{'s' * (len(plan.seeds) != 1)} {', '.join(map(str, plan.seeds))}, "
        f"lr chosen from {rates} by the validation split. "
        f"The intervals are over seeds; the {len(task.test)} test examples are the same throughout. "
        f"Failed, at any lr: the loss overflowed, or the validation {task.metric_name} ended above "
        f"{format(task.hopeless, task.metric_format)}."
    )
    if any(edge_mark(comparison, verdict) for verdict in comparison.verdicts):
        table.caption = f"{table.caption} *: at the edge of the choice."
    return table


def edge_mark(comparison: Comparison, verdict: Verdict) -> str:
    """Return a star if the chosen rate is the smallest or largest on offer: more choice might do better."""
    return "*" if verdict.lr in (min(comparison.plan.rates), max(comparison.plan.rates)) else ""


def difference_sentence(comparison: Comparison, first: Verdict, second: Verdict) -> str:
    """Say by how much two arms differ on the test split, seed by seed, and whether chance explains it.

    Args:
        comparison: where the verdicts are from.
        first: one arm.
        second: another arm.

    Returns:
        One sentence.
    """
    task = comparison.plan.task
    interval = comparison.difference(first, second)
    name = f"{first.arm.label} minus {second.arm.label}"
    if not interval.count:
        return f"{name}: no seed on which both finished."
    if interval.count == 1:
        return f"{name}: {interval.show(task.metric_format)}, one seed, so there is no interval."
    told = abs(interval.mean) > interval.half_width
    return (
        f"{name}, paired over {interval.count} seeds: {interval.show(task.metric_format)}; the interval "
        f"{'excludes zero' if told else 'includes zero, so no difference can be told'}."
    )


def write_tables(comparison: Comparison, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write ``comparison.csv`` (one line per arm), ``runs.csv`` (per run) and ``epochs.csv`` (per epoch).

    In ``runs.csv`` the test column is empty for runs at rates that were not chosen: nobody looked.

    Args:
        comparison: what to write.
        folder: an existing folder.

    Returns:
        The files.

    Raises:
        InputError: a file cannot be written.
    """
    metric = comparison.plan.task.metric_name
    tested = {
        (verdict.arm.label, verdict.lr, seed): value
        for verdict in comparison.verdicts
        for seed, value in verdict.test_by_seed.items()
    }
    arms: list[list[object]] = [
        [v.arm.label, v.lr, v.valid.mean, v.test.mean, v.test.half_width, v.test.count, v.diverged]
        for v in comparison.verdicts
    ]
    runs: list[list[object]] = []
    epochs: list[list[object]] = []
    for run in comparison.runs:
        name: list[object] = [run.arm.label, run.lr, run.seed]
        last = run.history.last
        final = [last.valid_loss, last.valid_metric, last.seconds] if last else ["", "", ""]
        status = "diverged" if run.history.diverged else "failed" if run.failed else "ok"
        runs.append([*name, status, *final, tested.get((run.arm.label, run.lr, run.seed), "")])
        for r in run.history.records:
            epochs.append([*name, r.epoch, r.step, r.train_loss, r.valid_loss, r.valid_metric])
    who = ["arm", "learning_rate", "seed"]
    mean_header = [f"valid_{metric}", f"test_{metric}", "half_width_95", "seeds", "diverged"]
    run_header = [*who, "status", "valid_loss", f"valid_{metric}", "seconds", f"test_{metric}"]
    epoch_header = [*who, "epoch", "step", "train_loss", "valid_loss", f"valid_{metric}"]
    return (
        _write(Path(folder) / "comparison.csv", [*who[:2], *mean_header], arms),
        _write(Path(folder) / "runs.csv", run_header, runs),
        _write(Path(folder) / "epochs.csv", epoch_header, epochs),
    )


def _write(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    with replacing(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path
