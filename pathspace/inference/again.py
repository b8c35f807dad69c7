"""An interpretation goes on with a further capture of the same model: what is found has to hold in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pathspace.capture import Captured
from pathspace.inference.interpreter import interpret
from pathspace.inference.relations import Relations
from pathspace.inference.units import Scales
from pathspace.structure import Pin


@dataclass(frozen=True)
class Snapshot:
    """What a build changes in an interpretation, as it was before.

    Attributes:
        equations: equations between scales.
        approximate: scales that are free at ``eps = 0`` only.
        pins: operations that fixed a scale.
    """

    equations: Relations
    approximate: tuple[Tensor, ...]
    pins: tuple[Pin, ...]

    @classmethod
    def of(cls, scales: Scales) -> Snapshot:
        """The state of an interpretation after its run."""
        return cls(scales.equations.copy(), tuple(scales.approximate), tuple(scales.pins))

    def again(self, scales: Scales, captures: Sequence[Captured], norm_eps: str) -> int:
        """Put an interpretation back, and go on with other captures of the model.

        Args:
            scales: the interpretation this is a snapshot of.
            captures: the same model, captured at other sizes.
            norm_eps: as in the first run.

        Returns:
            How many uses of weights the first run had.
        """
        scales.equations, scales.approximate = self.equations, list(self.approximate)
        scales.pins = list(self.pins)
        uses = len(scales.uses)
        for captured in captures:
            interpret(captured, lambda *_: scales, norm_eps=norm_eps, affine=scales.affine)
        known = {(pin.op, pin.module, pin.source, pin.reason) for pin in self.pins}
        new = [p for p in scales.pins[len(self.pins) :] if (p.op, p.module, p.source, p.reason) not in known]
        scales.pins = [*self.pins, *new]
        return uses


__all__ = ["Snapshot"]
