"""The importance of a channel, computed from its slices of the model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..gauge.balance import canonical_copy
from ..inference.channels import Side
from ..models.walk import tensors_of
from ..tracing import trace

CRITERIA = ("weights", "paths", "gradients")


@torch.no_grad()
def importance(
    model: nn.Module, inputs: tuple[Sequence[Any], Mapping[str, Any]], by: str
) -> Callable[[Mapping[Side, Tensor], Iterable[Side]], Tensor]:
    """A function that gives the channels of a group one number each.

    ``"weights"``: ``(sum w^2)^(1/2)`` over all slices of the channel. ``"paths"``: the same in the
    one rescaled model of smallest ``sum w^2``, so that all rescaled models have the same numbers.
    Where a normalisation hides a scale there is none, and ``sum w^2 - log w^2`` takes its place,
    over pairs of units. ``"gradients"``: ``|sum w dL/dw|`` over the weights that read it.

    Args:
        model: the model.
        inputs: its example inputs, positional and by keyword.
        by: one of :data:`CRITERIA`.

    Returns:
        A function of (tensor, dimension) -> positions, shape ``(channels, positions)``, and of the
        sides that read the channels, with numbers of shape ``(channels,)`` in float64.

    Raises:
        InputError: unknown ``by``, or a gradient is missing.
    """
    if by not in CRITERIA:
        raise InputError(
            f"importance found by={by!r}, expected one of {', '.join(map(repr, CRITERIA))}."
        )
    if by == "paths":
        with torch.enable_grad():
            graph = trace(model, *inputs[0], kwargs=inputs[1])
        model = canonical_copy(model, graph)
    tensors = tensors_of(model)

    def scores(slices: Mapping[Side, Tensor], readers: Iterable[Side]) -> Tensor:
        own = [side for side in slices if isinstance(tensors[side[0]], nn.Parameter)]
        if by == "gradients":
            parts = [
                _total(_times_gradient(tensors, name), dim, slices[name, dim])
                for name, dim in own
                if (name, dim) in readers
            ]
            return torch.stack(parts).sum(0).abs()
        return (
            torch.stack([_total(tensors[side[0]] ** 2, side[1], slices[side]) for side in own])
            .sum(0)
            .sqrt()
        )

    return scores


def _times_gradient(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    gradient = tensors[name].grad
    if gradient is None:
        raise InputError(
            f"importance by gradients found none at {name!r}; call backward() on a loss first."
        )
    return tensors[name] * gradient


def _total(tensor: Tensor, dim: int, where: Tensor) -> Tensor:
    """Sum over a channel's positions along one dimension."""
    others = [other for other in range(tensor.dim()) if other != dim]
    wide = tensor.detach().cpu().double()
    return (wide.sum(others) if others else wide)[where].sum(1)
