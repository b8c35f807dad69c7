"""Are the numbers of a model and of its inputs numbers?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pathspace.errors import InputError
from pathspace.nested import leaves


def _entries(tensor: Tensor) -> Tensor:
    """The entries that a tensor stores: of sparse ones, those that are not 0."""
    if tensor.layout == torch.strided:
        return tensor.detach().reshape(-1)
    return (tensor.detach().coalesce() if tensor.layout == torch.sparse_coo else tensor.detach()).values().reshape(-1)


def _wrong(tensor: Tensor, masks: bool) -> int:
    """How many entries are NaN or infinite, looked at in pieces so that no large temporary is made.

    Args:
        tensor: what to look at.
        masks: whether minus infinity is what masks of attention are made of.
    """
    entries = _entries(tensor)
    pieces = (entries.float() if entries.element_size() == 1 else entries).split(1 << 22)
    return sum(int((~torch.isfinite(p) & ~(torch.isneginf(p) & masks)).sum()) for p in pieces)


def check_finite(model: nn.Module, inputs: Any) -> None:
    """Refuse weights and inputs that are not numbers; buffers and inputs may be masks, with minus infinity in them.

    Raises:
        InputError: naming the first tensor with NaN or infinity.
    """
    observers = {name for name, module in model.named_modules() if hasattr(module, "calculate_qparams")}
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if name.rpartition(".")[0] in observers:
                # a range that has not been observed yet is from infinity to minus infinity
                continue
            bad = _wrong(tensor, kind == "buffer") if tensor.is_floating_point() else 0
            if bad:
                raise InputError(
                    f"{type(model).__name__} has {bad} values in {kind} {name!r} that are NaN or infinite, "
                    "expected finite numbers; "
                    "verify a checkpoint from before it diverged."
                )
    for leaf in leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and _wrong(leaf, masks=True):
            raise InputError(
                "The example inputs contain NaN or infinite values, expected finite numbers (or -inf in a mask); "
                "pass a real batch."
            )


__all__ = ["check_finite"]
