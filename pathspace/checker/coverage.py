"""What has been seen of a model: the effect of every weight, and both sides of every gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .document import Tensor

# how often every weight must have an effect: two units may have equal random scales once
TIMES = 4
# an effect is seen if it is so many times the tolerance
CLEAR = 16
# draws without anything new, after which the rest counts as unseen
LEAST, PATIENCE = 12, 40
RECTIFIERS = {"leaky_relu", "prelu", "_prelu_kernel", "relu", "relu6", "threshold"}
GATES = RECTIFIERS | {"abs", "clamp", "clamp_min", "hardtanh"}


class Coverage:
    """Counts of what was seen of a document's tensors while outputs were compared."""

    def __init__(self, blocks: list[Tensor], tolerance: float) -> None:
        self._clear = CLEAR * tolerance
        self._dead = {b.name: None if b.unused is None else b.unused for b in blocks}
        self._weights = {b.name: np.zeros(b.shape, np.int8) for b in blocks}
        self._gates: dict[int, tuple[Any, Any]] = {}
        self._now: list[tuple[Any, Any]] = []
        self._effects: Mapping[str, Any] = {}
        self._known, self._idle = -1, 0

    def look(self, derivatives: Mapping[str, Any]) -> None:
        """Note the effects of all weights at the present numbers."""
        self._effects = derivatives

    def watch(self, run: Callable[[], Any]) -> Any:
        """Run a model, and note the signs of what its gates read."""
        recorder = recorder_of_gates()
        with recorder:
            outputs = run()
        self._now = recorder.signs
        return outputs

    def count(self) -> None:
        """Count what is noted: the outputs were compared at these numbers."""
        for name, effect in self._effects.items():
            if name in self._weights:
                seen = (effect > self._clear).cpu().numpy().reshape(self._weights[name].shape)
                self._weights[name] += seen & (self._weights[name] < TIMES)
        for number, (above, below) in enumerate(self._now):
            known = self._gates.get(number)
            if known is not None and known[0].shape == above.shape:
                above, below = above | known[0], below | known[1]
            self._gates[number] = above, below

    def complete(self, draws: int) -> bool:
        """Whether all has been seen, or nothing new for many draws."""
        weights = sum(int(self._of(name).sum()) for name in self._weights)
        gates = sum(int(a.sum()) + int(b.sum()) for a, b in self._gates.values())
        self._idle = 0 if weights + gates > self._known else self._idle + 1
        self._known = weights + gates
        return draws >= LEAST and (not self.unseen() or self._idle >= PATIENCE)

    def _of(self, name: str) -> Any:
        """The counts of a tensor; scalars that are unused have none to be seen."""
        dead, counts = self._dead[name], self._weights[name]
        return counts if dead is None else np.where(dead, np.int8(TIMES), counts)

    def unseen(self) -> list[str]:
        """What was not seen, in words."""
        found = []
        for name in self._weights:
            counts = self._of(name)
            few = int((counts < TIMES).sum())
            if few:
                found.append(f"the effect of {few:,} of {counts.size:,} scalars of {name}")
        sides = [np.stack([above, below]) for above, below in self._gates.values()]
        gates = sum(int(side[0].size) for side in sides)
        one = sum(int((~side.all(0)).sum()) for side in sides)
        if one:
            found.append(f"both sides of {one:,} of {gates:,} gates")
        return found


def recorder_of_gates() -> Any:
    """A context that notes which entries of what a gate reads are above and below 0, for every
    place in a sample (dimension 0), and the ``eps`` of the coarsest type of numbers.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        supports_higher_order_operators = True

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.signs: list[tuple[Any, Any]] = []
            self.eps = 0.0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            name = str(getattr(func, "overloadpacket", "")).removeprefix("aten.").rstrip("_")
            value: Any = args[0] if args else None
            if name in GATES and hasattr(value, "is_complex") and not value.is_complex():
                rows = value.detach().reshape(value.shape[0] if value.dim() > 1 else 1, -1)
                sides = [side.any(0).cpu().numpy() for side in (rows > 0, rows < 0)]
                self.signs.append((sides[0], sides[1]))
            result = func(*args, **(kwargs or {}))
            if getattr(result, "dtype", torch.int64).is_floating_point:
                self.eps = max(self.eps, torch.finfo(result.dtype).eps)
            return result

    return Recorder()
