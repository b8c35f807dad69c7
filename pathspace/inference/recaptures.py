"""Continue an interpretation with further captures of the same model: the result
must hold for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..capture.captured import Captured
from ..graph.parts import Pin
from .interpreter import interpret
from .relations import Relations
from .units import Scales


@dataclass(frozen=True)
class InterpretationState:
    """The state of an interpretation that :func:`pathspace.inference.build.build_graph` changes.

    Attributes:
        equations: equations between scales.
        approximate: scales that are free only at ``eps = 0``.
        pins: operations that fix scales.
    """

    equations: Relations
    approximate: tuple[Tensor, ...]
    pins: tuple[Pin, ...]

    @classmethod
    def of(cls, scales: Scales) -> InterpretationState:
        """The state of an interpretation after its run."""
        return cls(scales.equations.copy(), tuple(scales.approximate), tuple(scales.pins))

    def again(self, scales: Scales, captures: Sequence[Captured], norm_eps: str) -> int:
        """Restore an interpretation, and continue it with other captures of the model.

        Args:
            scales: the interpretation of this snapshot.
            captures: the same model, captured at other sizes.
            norm_eps: as in the first run.

        Returns:
            Number of uses of weights in the first run.
        """
        scales.equations, scales.approximate = self.equations, list(self.approximate)
        scales.pins = list(self.pins)
        uses = len(scales.flows.uses)
        for captured in captures:
            interpret(captured, lambda *_: scales, norm_eps=norm_eps, affine=scales.affine)
        known = {(pin.op, pin.module, pin.source, pin.reason) for pin in self.pins}
        new = [
            p
            for p in scales.pins[len(self.pins) :]
            if (p.op, p.module, p.source, p.reason) not in known
        ]
        scales.pins = [*self.pins, *new]
        return uses
