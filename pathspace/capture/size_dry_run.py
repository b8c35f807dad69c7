"""Tests whether a model runs on inputs of other sizes, on a copy without values;
much cheaper than a capture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.utils._pytree import tree_map

from ..models.copies import safe_deepcopy
from ..models.isolation import quiet
from ..models.stand_in import count_no_batches
from ..models.values import fake_mode, give_shapes


class Rehearsal:
    """A copy of a model whose tensors have shapes but no values.

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
        count_no_batches(twin)
        with quiet(), torch.no_grad(), FakeCopyMode(self._mode):
            self._twin = safe_deepcopy(twin)

    def runs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the model accepts inputs of these shapes; false if its control flow
        depends on their values.
        """
        try:
            with quiet(), torch.no_grad(), self._mode:
                args, kwargs = tree_map(self._fake, (args, dict(kwargs)))
                self._twin(*args, **kwargs)
        except Exception:
            # a model can raise any exception on wrong shapes
            return False
        return True

    def _fake(self, leaf: Any) -> Any:
        # (symbolic sizes are many times slower)
        return (
            self._mode.from_tensor(leaf, static_shapes=True)
            if isinstance(leaf, torch.Tensor)
            else leaf
        )
