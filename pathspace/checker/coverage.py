"""What has been seen of a model: the effect of every weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .document import Tensor

# how often every weight must have an effect: two units may have equal random scales once
TIMES = 4
# an effect is seen if it is so many times the tolerance
CLEAR = 16
# draws without anything new, after which the rest counts as unseen
LEAST, PATIENCE = 12, 40


class Coverage:
    """Counts of what was seen of a document's tensors while outputs were compared."""

    def __init__(self, blocks: list[Tensor], tolerance: float) -> None:
        self._clear = CLEAR * tolerance
        self._weights = {b.name: np.zeros(b.shape, np.int8) for b in blocks}
        for block in blocks:
            if block.unused is not None:
                # (which have no effect to be seen)
                self._weights[block.name][np.broadcast_to(block.unused, block.shape)] = TIMES
        self._known, self._idle = -1, 0

    def count(self, derivatives: Mapping[str, Any]) -> None:
        """Count the effects of all weights at numbers at which the outputs were compared."""
        for name, effect in derivatives.items():
            if name in self._weights:
                seen = (effect > self._clear).cpu().numpy().reshape(self._weights[name].shape)
                self._weights[name] += seen & (self._weights[name] < TIMES)

    def complete(self, draws: int) -> bool:
        """Whether all has been seen, or nothing new for many draws."""
        known = sum(int(counts.sum()) for counts in self._weights.values())
        self._idle = 0 if known > self._known else self._idle + 1
        self._known = known
        return draws >= LEAST and (not self.unseen() or self._idle >= PATIENCE)

    def unseen(self) -> list[str]:
        """What was not seen, in words."""
        found = []
        for name, counts in self._weights.items():
            few = int((counts < TIMES).sum())
            if few:
                found.append(f"the effect of {few:,} of {counts.size:,} scalars of {name}")
        return found
