"""Refuse NaN and infinity in a model and its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, InputTypeError
from .nested import real_leaves


def count_nonfinite(tensor: Tensor, masks: bool = False) -> int:
    """How many entries are NaN or infinite, counted in pieces, without a large temporary.

    With ``masks``, minus infinity is what masks of attention are made of. Of sparse tensors the
    entries that they store count.
    """
    entries = tensor.detach()
    if entries.layout != torch.strided:
        sparse = entries.layout == torch.sparse_coo
        entries = (entries.coalesce() if sparse else entries).values()
    entries = entries.reshape(-1)
    # a sum is finite only if all of its terms are, and takes no memory
    if entries.element_size() > 1 and bool(torch.isfinite(entries.sum())):
        return 0
    pieces = (entries.float() if entries.element_size() == 1 else entries).split(1 << 22)
    return sum(int((~torch.isfinite(p) & ~(torch.isneginf(p) & masks)).sum()) for p in pieces)


def check_finite(model: nn.Module, inputs: Any) -> None:
    """Refuse NaN and infinity in a model and its inputs; masks may hold minus infinity."""
    observers = {
        name for name, module in model.named_modules() if hasattr(module, "calculate_qparams")
    }
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if name.rpartition(".")[0] in observers:
                # a range that has not been observed yet is from infinity to minus infinity
                continue
            bad = count_nonfinite(tensor, kind == "buffer") if tensor.is_floating_point() else 0
            if bad:
                raise InputError(
                    f"{type(model).__name__} has {bad} values in {kind} {name!r} that are NaN or"
                    " infinite, expected finite numbers; use a checkpoint from before it diverged."
                )
    for leaf in real_leaves(inputs):
        if count_nonfinite(leaf, masks=True):
            raise InputError(
                "The example inputs contain NaN or infinite values, expected finite numbers (or"
                " -inf in a mask); pass a real batch."
            )


def expect_finite(owner: str, name: str, tensor: Tensor) -> None:
    """Refuse a tensor of weights with NaN or infinity."""
    if count_nonfinite(tensor):
        raise InputError(
            f"{owner} found values in {name!r} that are NaN or infinite, expected finite ones; give"
            " a checkpoint from before it diverged."
        )


def expect_scales(owner: str, phi: Any, units: int) -> None:
    """Refuse what is not a vector of log-scales, one finite number per unit."""
    if not isinstance(phi, Tensor):
        raise InputTypeError(
            f"{owner} found phi of type {type(phi).__name__}, expected a tensor of shape"
            f" ({units},); start from torch.zeros({units})."
        )
    if tuple(phi.shape) != (units,):
        raise InputError(
            f"{owner} found phi of shape {tuple(phi.shape)}, expected ({units},): one log-scale per"
            " unit."
        )
    if count_nonfinite(phi):
        raise InputError(
            f"{owner} found NaN or infinity in phi, expected finite log-scales; check the code that"
            " makes phi."
        )
