"""The gauge in action: multiply a model's parameters so that its function stays the same."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from pathspace.errors import InputError
from pathspace.reduction import ReductionGraph

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def rescale(model: M, graph: ReductionGraph, phi: Tensor) -> M:
    """Apply a gauge transformation to ``model`` in place: ``w_e <- w_e exp(phi(head e) - phi(tail e))``.

    Running statistics of normalisation layers are rescaled along, so the function is kept in eval mode, too.

    Args:
        model: the traced model, or a copy with the same parameter names.
        graph: its reduction graph.
        phi: log-scales of the units, shape ``(num_units,)``.

    Returns:
        The model.

    Raises:
        InputError: wrong shape of ``phi``, or a parameter is missing.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).double()
        >>> x = torch.randn(5, 2).double()
        >>> before, graph = model(x), ps.trace(model, x)
        >>> after = ps.rescale(model, graph, torch.randn(3).double())(x)
        >>> torch.allclose(before, after, rtol=1e-12)
        True
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if tuple(phi.shape) != (graph.num_units,):
        raise InputError(
            f"rescale found phi of shape {tuple(phi.shape)}, expected ({graph.num_units},): one log-scale per unit."
        )
    for name, (head, tail) in graph.gauge_factors(phi.double()).items():
        if name not in tensors:
            raise InputError(
                f"rescale found no parameter {name!r} in {type(model).__name__}; pass the traced model or a copy of it."
            )
        tensors[name].mul_(head.to(tensors[name])).div_(tail.to(tensors[name]))
    return model
