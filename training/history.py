"""The progress and the results of a run: one record per epoch, the best one, and their table."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import astuple, dataclass, fields
from typing import Any

from pathspace.diagnostics.shared.tables import plain
from pathspace.files.json_lines import append_lines
from pathspace.files.writing import replacing


@dataclass(frozen=True)
class Tick:
    """The argument of a watcher after each step: the position in the run and the
    latest results (NaN if none).

    Args:
        step: number of optimizer steps done.
        steps: number of optimizer steps of the whole run.
        epoch: the current epoch, counted from 1.
        loss: mean loss of this epoch so far.
        metric: metric on the validation split after the previous epoch.
    """

    step: int
    steps: int
    epoch: int
    loss: float
    metric: float


@dataclass(frozen=True)
class Score:
    """Loss and metric of a model on one split, both means over its examples."""

    loss: float
    metric: float


@dataclass(frozen=True)
class Partial:
    """The completed part of an epoch, from which its record is computed.

    Args:
        steps: optimizer steps done in this epoch.
        examples: examples of these steps.
        loss_sum: sum of the losses of these examples, each computed before its own step.
        seconds: time since the start of the run, without interruptions.
    """

    steps: int = 0
    examples: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss of the examples so far."""
        return self.loss_sum / self.examples if self.examples else math.nan


@dataclass(frozen=True)
class EpochRecord:
    """The state of a run after one epoch.

    Args:
        epoch: epochs done, counted from 1.
        step: optimizer steps done since the start of the run.
        train_loss: mean loss over the batches of this epoch, each computed before its own step.
        valid_loss: mean loss on the validation split after the epoch.
        valid_metric: metric on the validation split after the epoch.
        seconds: time since the start of the run, without interruptions.
    """

    epoch: int
    step: int
    train_loss: float
    valid_loss: float
    valid_metric: float
    seconds: float

    @property
    def finite(self) -> bool:
        """Whether both losses are finite."""
        return math.isfinite(self.train_loss) and math.isfinite(self.valid_loss)


@dataclass(frozen=True)
class History:
    """All epochs of a run, in order.

    A run diverges when a loss is not finite; its last record is then that of the
    epoch in which this happened.

    Example:
        >>> record = EpochRecord(1, 38, 2.0, math.nan, 0.9, 0.1)
        >>> History((record,)).diverged
        True
    """

    records: tuple[EpochRecord, ...] = ()

    @property
    def diverged(self) -> bool:
        """Whether a loss is not finite."""
        return bool(self.records) and not self.records[-1].finite

    @property
    def last(self) -> EpochRecord | None:
        """Return the last record, ``None`` before the first epoch has ended."""
        return self.records[-1] if self.records else None

    def rows(self, metric_name: str) -> list[dict[str, Any]]:
        """Return one row per epoch, by the column names of the files.

        Args:
            metric_name: the column of the metric becomes ``valid_<metric_name>``.

        Example:
            >>> (row,) = History((EpochRecord(1, 38, 2.0, 1.9, 0.9, 0.1),)).rows("error")
            >>> row["valid_error"], row["status"]
            (0.9, 'ok')
        """
        names = _columns(metric_name)
        return [
            dict(zip(names, (*astuple(r), "ok" if r.finite else "diverged"), strict=True))
            for r in self.records
        ]

    def write_csv(self, path: str | os.PathLike[str], metric_name: str) -> None:
        """Write one line per epoch; an existing file is replaced completely or not at all.

        Args:
            path: the file.
            metric_name: the column of the metric becomes ``valid_<metric_name>``.

        Raises:
            InputError: the file cannot be written.
        """
        with replacing(path) as temporary, open(temporary, "w", newline="") as file:
            # (str of a float is the shortest text for exactly this number)
            writer = csv.DictWriter(file, _columns(metric_name))
            writer.writeheader()
            writer.writerows(self.rows(metric_name))

    def write_jsonl(self, path: str | os.PathLike[str], metric_name: str) -> None:
        """Write one JSON object per epoch and line, with ``null`` for numbers that are not finite.

        Args:
            path: the file; an existing one is replaced completely or not at all.
            metric_name: the key of the metric becomes ``valid_<metric_name>``.

        Raises:
            InputError: the file cannot be written.
        """
        with replacing(path) as temporary:
            append_lines(temporary, plain(self.rows(metric_name)))


def best_record(history: History) -> EpochRecord | None:
    """Return the record with the lowest validation metric, and the first of equal ones.

    Args:
        history: the epochs of a run.

    Returns:
        The record; ``None`` if no epoch has a finite loss.

    Example:
        >>> records = tuple(
        ...     EpochRecord(i + 1, i, 0.5, 0.5, metric, 0.0)
        ...     for i, metric in enumerate((0.3, 0.2, 0.2))
        ... )
        >>> best_record(History(records)).epoch
        2
    """
    sound = [
        record
        for record in history.records
        if record.finite and record.valid_metric == record.valid_metric
    ]
    return min(sound, key=lambda record: record.valid_metric, default=None)


def exhausted(history: History, patience: int | None) -> bool:
    """Whether the metric has not improved for ``patience`` epochs.

    This depends only on the records, so that a resumed run stops at the same epoch
    as an uninterrupted one.

    Args:
        history: the epochs of a run.
        patience: allowed number of epochs without improvement; ``None`` for no limit.

    Example:
        >>> records = tuple(
        ...     EpochRecord(i + 1, i, 0.5, 0.5, metric, 0.0)
        ...     for i, metric in enumerate((0.3, 0.2, 0.2))
        ... )
        >>> exhausted(History(records), 1), exhausted(History(records), 2)
        (True, False)
    """
    best, last = best_record(history), history.last
    return (
        patience is not None
        and best is not None
        and last is not None
        and last.epoch - best.epoch >= patience
    )


def _columns(metric_name: str) -> list[str]:
    """The names of the columns: the fields of a record, and ``status``."""
    names = [field.name for field in fields(EpochRecord)]
    return [name.replace("metric", metric_name) for name in names] + ["status"]
