"""Does a model run on inputs of other sizes? Tried on a copy without numbers, which costs a fraction of a capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.utils._pytree import tree_map

from pathspace.capture import quiet
from pathspace.safe_deepcopy import safe_deepcopy
from pathspace.without_values import fake_mode, give_shapes


class Rehearsal:
    """A copy of a model whose tensors have shapes and no numbers.

    Args:
        model: any module.

    Example:
        >>> import torch
        >>> rehearsal = Rehearsal(torch.nn.Linear(3, 2))
        >>> [rehearsal.runs((torch.ones(*shape),), {}) for shape in ((7, 3), (7, 4))]
        [True, False]
    """

    def __init__(self, model: nn.Module) -> None:
        self._mode = fake_mode()
        twin = safe_deepcopy(model, share_tensors=True)
        give_shapes(twin, self._mode)
        with quiet(), torch.no_grad(), FakeCopyMode(self._mode):
            self._twin = safe_deepcopy(twin)

    def runs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the model accepts inputs of these shapes (what depends on their values counts as not)."""
        try:
            with quiet(), torch.no_grad(), self._mode:
                args, kwargs = tree_map(self._fake, (args, dict(kwargs)))
                self._twin(*args, **kwargs)
        except Exception:
            # whatever a model raises on shapes it does not take
            return False
        return True

    def _fake(self, leaf: Any) -> Any:
        # (sizes as symbols would cost many times as much)
        return self._mode.from_tensor(leaf, static_shapes=True) if isinstance(leaf, torch.Tensor) else leaf


__all__ = ["Rehearsal"]
