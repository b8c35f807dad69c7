"""Quantities that gradient flow conserves: one for every free scale of the network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pathspace.errors import expect_arguments
from pathspace.reduction import ReductionGraph


def conserved(graph: ReductionGraph) -> Tensor:
    """``sum_{e into v} w_e^2 - sum_{e out of v} w_e^2`` for every unit ``v``.

    Every loss gradient satisfies ``sum_in w g = sum_out w g`` exactly, so these sums are constant
    along gradient flow ``dw/dt = -g``. Gradient descent with learning rate ``lr`` changes them by
    ``O(lr^2)`` per step; a larger change is caused by weight decay, momentum or noise.

    Args:
        graph: the reduction graph of a model; its current weights are used.

    Returns:
        float64 tensor of shape ``(num_units,)``.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
        ... ).double()
        >>> x, y = torch.randn(16, 3).double(), torch.randn(16, 1).double()
        >>> graph = ps.trace(model, x)
        >>> before, optimizer = conserved(graph), torch.optim.SGD(model.parameters(), lr=1e-4)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> _ = optimizer.step()
        >>> bool((conserved(graph) - before).abs().max() < 1e-6)
        True

    Reference:
        Du, Hu, Lee: Algorithmic regularization in learning deep homogeneous models (2018), Theorem
        2.1, for layered networks.
    """
    expect_arguments("conserved", graph=graph)
    incoming, outgoing = unit_sums(graph, squared_weights(graph))
    return incoming - outgoing


@torch.no_grad()
def unit_sums(graph: ReductionGraph, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sums of the entries of tensors over the weights that enter, and over
    those that leave, every unit.

    Args:
        graph: a reduction graph.
        tensors: one tensor per block, by the block's name, in its shape.

    Returns:
        Two float64 tensors of shape ``(num_units,)``.
    """
    found = []
    for side in ("head", "tail"):
        total = torch.zeros(graph.expand.shape[0], dtype=torch.float64)
        for block in graph.blocks:
            value, ids = tensors[block.name].cpu(), getattr(block, side)
            if block.unused is not None:
                value = value.masked_fill(block.unused.expand(block.shape), 0)
            part = value.double().sum_to_size(ids.shape)
            flat = ids.reshape(-1)
            total.index_add_(0, flat.abs(), part.reshape(-1) * flat.sign())
        found.append(torch.from_numpy(graph.expand.T @ total.numpy())[1:])
    return found[0], found[1]


@torch.no_grad()
def squared_weights(
    graph: ReductionGraph, weights: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Squares of weights, by name of the block; the current ones where none are given."""
    values = {**graph.parameters, **(weights or {})}
    return {b.name: b.values(values[b.name].detach()).double().square() for b in graph.blocks}
