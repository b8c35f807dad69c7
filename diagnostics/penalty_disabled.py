"""The penal connection switched off for a while: what a gradient is when nothing is added to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# the attribute under which a penalised model holds its connection
PENAL = "penal_connection"


@contextmanager
def penalty_disabled(model: nn.Module, when: bool = True) -> Iterator[None]:
    """Switch the penal connection of a model off for a while; a model without one is left alone.

    Args:
        model: perhaps penalised, itself or a part of it.
        when: ``False`` does nothing.

    Example:
        >>> import torch
        >>> from pathspace.training import penalize
        >>> layer = penalize(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8), tau=1.0)
        >>> with penalty_disabled(layer):
        ...     layer.penal_connection.tau
        0.0
        >>> layer.penal_connection.tau
        1.0
    """
    connections = [vars(module)[PENAL] for module in model.modules() if PENAL in vars(module)] if when else []
    before = [connection.tau for connection in connections]
    try:
        for connection in connections:
            connection.tau = 0.0
        yield
    finally:
        for connection, tau in zip(connections, before, strict=True):
            connection.tau = tau


__all__ = ["PENAL", "penalty_disabled"]
