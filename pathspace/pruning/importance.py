"""The importance of a channel, computed from its slices of the model's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..gauge.balance import canonical_copy
from ..models.walk import tensors_of
from ..reduction import trace
from .groups import ChannelGroup, channel_sums, real

CRITERIA = ("weights", "paths", "gradients")


@torch.no_grad()
def importance(
    model: nn.Module,
    inputs: tuple[Sequence[Any], Mapping[str, Any]],
    by: str,
    groups: Iterable[ChannelGroup],
) -> dict[str, Tensor]:
    """The importance of the channels of each group, in float64.

    ``"weights"``: ``(sum w^2)^(1/2)`` over all slices of the channel. ``"paths"``: the same in the
    one rescaled model of smallest ``sum w^2``, so that all rescaled models have the same numbers.
    Where a normalisation hides a scale there is none, and ``sum w^2 - log w^2`` takes its place,
    over pairs of units. ``"gradients"``: ``|sum w dL/dw|`` over the weights that read it.
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

    def values(name: str) -> Tensor:
        own = tensors[name]
        if by != "gradients":
            return real(own).square()
        if own.grad is None:
            raise InputError(
                f"importance by gradients found none at {name!r}; call backward() on a loss first."
            )
        return real(own * own.grad)

    slices = {
        group.name: {
            side: where
            for side, where in group.slices.items()
            if isinstance(tensors[side[0]], nn.Parameter)
            and (by != "gradients" or side in group.readers)
        }
        for group in groups
    }
    return {
        name: total.abs() if by == "gradients" else total.sqrt()
        for name, total in channel_sums(slices, values).items()
    }
