"""Early stopping: a run ends after several epochs without improvement, with the
weights of the best epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .history import EpochRecord, History


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


class BestWeights:
    """A copy of the weights of the best epoch so far.

    Attributes:
        kept: epoch, validation metric and state dictionary; ``None`` before the first
            epoch with finite losses.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Any] | None = None

    def offer(self, history: History, weights: Mapping[str, Tensor]) -> bool:
        """Keep these weights if they are those of the best epoch.

        Args:
            history: the epochs so far; the weights are those after the last one.
            weights: state dictionary of the model.

        Returns:
            Whether they were kept.
        """
        best = best_record(history)
        if best is None or best is not history.last:
            return False
        copy = {name: value.detach().cpu().clone() for name, value in weights.items()}
        self.kept = {"epoch": best.epoch, "metric": best.valid_metric, "model": copy}
        return True
