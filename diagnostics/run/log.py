"""The record of a watched run."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from .alarms import Alarm
from .snapshot import Snapshot


@dataclass
class RunLog:
    """The numbers of a run, and its alarms.

    Attributes:
        model: the model, unwrapped.
        snapshots: the measured steps; from old ones the values per unit and per sample are deleted.
        rows: one mapping of names to numbers for each of them.
        alarms: the problems in the order in which they were found, each with its cause.
        notes: reasons for measurements that are missing.
        steps: optimizer steps so far.
        seconds: time spent on measurements so far, without the preparation.
        preparation: time spent on tracing the model, in seconds.
        running: whether the run has not ended.
    """

    model: nn.Module
    snapshots: list[Snapshot] = field(default_factory=list, init=False)
    rows: list[dict[str, float]] = field(default_factory=list, init=False)
    alarms: list[Alarm] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    steps: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)
    preparation: float = field(default=0.0, init=False)
    running: bool = field(default=False, init=False)

    @property
    def causes(self) -> list[Alarm]:
        """The alarms that no other alarm explains."""
        return [alarm for alarm in self.alarms if not alarm.because]
