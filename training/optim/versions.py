"""Whether other code has changed weights: their addresses, versions and strides, compared.

Torch counts the changes of a tensor's numbers, so that nothing is read from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from .sharding import local, version
from .slots import Slot

# address, version and strides of each weight
Look = list[tuple[int, int, tuple[int, ...]]]


class Versions:
    """What the weights of an optimizer were like at the last check.

    Args:
        slots: the tensors.
        cut: whether one of them is sharded.
    """

    def __init__(self, slots: Sequence[Slot], cut: bool) -> None:
        self._slots, self._cut = slots, cut
        self.seen = self.look()

    def look(self) -> Look:
        """Address, version and strides of each weight."""
        if self._cut:
            pairs = [(version(slot.parameter), local(slot.parameter)) for slot in self._slots]
            return [(held.data_ptr(), count, held.stride()) for count, held in pairs]
        return [(s.held.data_ptr(), s.held._version, s.held.stride()) for s in self._slots]

    def note(self) -> None:
        """Store the current ones."""
        self.seen = self.look()

    def note_step(self) -> None:
        """The same after a step, which changes only the weights' numbers."""
        if self._cut:
            self.note()
        else:
            self.seen = [
                (where, s.held._version, strides)
                for s, (where, _, strides) in zip(self._slots, self.seen, strict=True)
            ]

    def moved(self, now: Look) -> bool:
        """Whether the memory of a weight has changed."""
        return any(new[::2] != old[::2] for new, old in zip(now, self.seen, strict=True))
