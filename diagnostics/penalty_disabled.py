"""Temporary removal of the penal connection, for gradients of the loss alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# the attribute of a penalised model that has its connection
PENAL = "penal_connection"


@contextmanager
def penalty_disabled(model: nn.Module, when: bool = True) -> Iterator[None]:
    """A context in which the penal connection of a model, if it has one, is disabled.

    Args:
        model: any module; it or a part of it may be penalised.
        when: ``False`` has no effect.

    Example:
        >>> import torch
        >>> from pathspace.training import penalize
        >>> layer = penalize(
        ...     nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        ...     torch.randn(2, 5, 8),
        ...     tau=1.0,
        ... )
        >>> with penalty_disabled(layer):
        ...     layer.penal_connection.tau
        0.0
        >>> layer.penal_connection.tau
        1.0
    """
    connections = (
        [vars(module)[PENAL] for module in model.modules() if PENAL in vars(module)] if when else []
    )
    before = [connection.tau for connection in connections]
    try:
        for connection in connections:
            connection.tau = 0.0
        yield
    finally:
        for connection, tau in zip(connections, before, strict=True):
            connection.tau = tau


__all__ = ["PENAL", "penalty_disabled"]
