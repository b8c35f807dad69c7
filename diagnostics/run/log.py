"""The record of a watched run so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from pathspace.diagnostics.run.alarms import Alarm, causes
from pathspace.diagnostics.run.snapshot import Snapshot


@dataclass
class RunLog:
    """The numbers of a run, and its alarms.

    Attributes:
        model: the model, unwrapped.
        snapshots: the measured steps; old ones keep their numbers and lose what is kept per unit and sample.
        rows: one flat mapping of numbers for each of them.
        alarms: what is wrong, in the order in which it was found, each with its cause.
        notes: what could not be measured, and why.
        steps: optimizer steps so far.
        seconds: what measuring has cost so far, preparation apart.
        preparation: what tracing the model has cost.
        running: whether the run goes on.
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
        """The alarms that no other one explains."""
        return causes(self.alarms)


__all__ = ["RunLog"]
