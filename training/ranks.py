"""Communication between the processes of one run: sums, errors, and actions of
the first process for all.

Every function here must be called by all processes. With one process there is no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_fabric import Fabric

from pathspace.errors import PathspaceError

T = TypeVar("T")


def total(fabric: Fabric, *values: float) -> tuple[float, ...]:
    """Sum numbers over processes, in float64.

    Args:
        fabric: knows the processes.
        *values: this process's numbers.

    Returns:
        The sums, the same on every process.

    Example:
        >>> total(Fabric(accelerator="cpu", devices=1), 1.5, 2.0)
        (1.5, 2.0)
    """
    if fabric.world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=fabric.device)
    dist.all_reduce(tensor)
    return tuple(tensor.tolist())


def gather(fabric: Fabric, value: T) -> list[T]:
    """Return the values of all processes, in their order.

    Args:
        fabric: knows the processes.
        value: anything that can be pickled.

    Returns:
        One value per process.
    """
    if fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(values, value)
    return values


def first(fabric: Fabric, action: Callable[[], T]) -> T:
    """Run an action in the first process, and send its result, or its error, to all.

    Args:
        fabric: the processes.
        action: the action; its result must be picklable.

    Returns:
        The result of the action in the first process.

    Raises:
        PathspaceError: the action raised it; then every process raises it.

    Example:
        >>> first(Fabric(accelerator="cpu", devices=1), lambda: "written")
        'written'
    """
    if fabric.world_size == 1:
        return action()
    outcome: list[Any] = [None, None]
    if fabric.global_rank == 0:
        try:
            outcome[0] = action()
        except PathspaceError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]  # type: ignore[no-any-return]


def everyone(fabric: Fabric, action: Callable[[], T]) -> T:
    """Run an action in every process, with an error in all of them if one fails.

    Args:
        fabric: the processes.
        action: the action.

    Returns:
        The result of the action in this process.

    Raises:
        PathspaceError: the action raised it in a process; every process raises the error
            of the first such process.
    """
    result, failure = None, None
    try:
        result = action()
    except PathspaceError as error:
        failure = error
    failures = [error for error in gather(fabric, failure) if error is not None]
    if failures:
        raise failures[0]
    return result  # type: ignore[return-value]
