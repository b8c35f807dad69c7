"""Penal connections of a model: their temporary removal, for gradients of the loss alone, and the
steps of their schedules, for checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
        >>> from pathspace.training import penalise_
        >>> layer = penalise_(
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
    connections = list(_connections(model).values()) if when else []
    before = [connection.tau for connection in connections]
    try:
        for connection in connections:
            connection.tau = 0.0
        yield
    finally:
        for connection, tau in zip(connections, before, strict=True):
            connection.tau = tau


def schedule_steps(model: nn.Module) -> dict[str, int]:
    """Module with a penal connection -> the step of its schedule.

    Example:
        >>> schedule_steps(nn.Linear(2, 2))
        {}
    """
    return {name: connection.step for name, connection in _connections(model).items()}


def restore_schedule_steps(model: nn.Module, steps: Mapping[str, int]) -> None:
    """Set the steps that :func:`schedule_steps` returned; modules without a connection are left."""
    for name, connection in _connections(model).items():
        connection.step = steps.get(name, connection.step)


def _connections(model: nn.Module) -> dict[str, Any]:
    return {
        name: vars(module)[PENAL] for name, module in model.named_modules() if PENAL in vars(module)
    }


__all__ = ["PENAL", "penalty_disabled", "restore_schedule_steps", "schedule_steps"]
