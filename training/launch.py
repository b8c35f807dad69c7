"""Device, number of processes and precision of a run; and errors of only the first process."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import typer
from lightning_fabric import Fabric
from lightning_fabric.loggers.logger import Logger
from lightning_fabric.utilities.exceptions import MisconfigurationException

from pathspace.cli.errors import BAD_INPUT
from pathspace.errors import InputError, PathspaceError, UnsupportedError

# The supported accelerators, strategies and precisions of Fabric, by the users' names.
DEVICES = ("cpu", "cuda", "mps", "auto")
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")
# How long other processes wait after a failure, so that the first one can report it
# before the launcher ends it.
PATIENCE_SECONDS = 2.0


def make_fabric(
    device: str = "cpu",
    devices: int | None = None,
    strategy: str = "auto",
    precision: str = "32-true",
    loggers: Sequence[Logger] = (),
) -> Fabric:
    """Set up device, processes and precision; ``fabric.launch()`` then
    starts the missing processes.

    Processes that ``torchrun`` has started are used as they are.

    Args:
        device: one of ``DEVICES``.
        devices: processes on this machine, one device each; ``None`` means those
            of ``torchrun``, or one.
        strategy: one of ``STRATEGIES``; ``"auto"`` is ``"ddp"`` for several processes.
        precision: one of ``PRECISIONS``.
        loggers: loggers for the results of every epoch, besides the files of the trainer.

    Returns:
        A Fabric that has not been launched.

    Raises:
        InputError: a name is unknown, the devices are not available, or they cannot
            compute in this precision.

    Example:
        >>> make_fabric().world_size
        1
        >>> make_fabric("abacus")
        Traceback (most recent call last):
        ...
        pathspace.errors.InputError: There is no device 'abacus'; choose one of: cpu, cuda, mps, auto.
    """  # noqa: E501
    for what, value, known in (
        ("device", device, DEVICES),
        ("strategy", strategy, STRATEGIES),
        ("precision", precision, PRECISIONS),
    ):
        if value not in known:
            raise InputError(f"There is no {what} '{value}'; choose one of: {', '.join(known)}.")
    _expect_precision(device, precision)
    if devices is not None and devices < 1:
        raise InputError(
            f"A run needs at least one device, found {devices}; give --devices 1 or more."
        )
    here, nodes = devices or 1, 1
    if dist.is_available() and dist.is_torchelastic_launched():
        here, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        nodes = world // here
        if devices is not None and devices != here:
            raise InputError(
                f"torchrun has started {here} processes on this machine, but --devices is"
                f" {devices}; do not pass --devices."
            )
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    try:
        return Fabric(
            accelerator=device,
            devices=here,
            num_nodes=nodes,
            strategy="ddp" if strategy == "auto" and here * nodes > 1 else strategy,
            precision=precision,  # type: ignore[arg-type]
            loggers=list(loggers),
        )
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        count = f"{here} of the device" if here > 1 else "The device"
        raise InputError(
            f"{count} '{device}' {'are' if here > 1 else 'is'} not available here; use --device"
            " cpu."
        ) from (error)


def _expect_precision(device: str, precision: str) -> None:
    """Raise an error for a precision in which the device cannot compute."""
    if device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        device = found.type if found else "cpu"
    lacking = {("cpu", "16-mixed"): "bf16-mixed", ("mps", "64-true"): "32-true"}
    if device == "cuda" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        lacking["cuda", "bf16-mixed"] = "16-mixed"
    if other := lacking.get((device, precision)):
        raise InputError(
            f"The device '{device}' cannot compute in the precision {precision}; use --precision"
            f" {other}."
        )


@contextmanager
def rank0_errors() -> Iterator[None]:
    """A context in which only the first of several processes reports an error.

    Raises:
        PathspaceError: in the first process; also if another process of the run has died.
        typer.Exit: in another process, in its place.

    Example:
        >>> with rank0_errors():
        ...     pass
    """
    # RANK is set by torchrun, LOCAL_RANK also by Fabric's launcher.
    rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
    try:
        try:
            yield
        except RuntimeError as error:
            if not _lost_connection(error):
                raise
            raise UnsupportedError(
                "Another process of this run has failed; the last checkpoint is complete: add"
                " --resume to continue."
            ) from error
    except PathspaceError as error:
        if rank == 0:
            raise
        time.sleep(PATIENCE_SECONDS)
        raise typer.Exit(BAD_INPUT) from error
    finally:
        shutdown()


def shutdown() -> None:
    """Leave the group of processes, if there is one, at the end of a run.

    The threads of a group end with the last object that refers to it, such as a wrapped model. A
    thread that frees a tensor while the interpreter shuts down aborts the process, so unused
    objects are collected first.

    Example:
        >>> shutdown()
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _lost_connection(error: RuntimeError) -> bool:
    """Whether an error means that the processes of a run have lost their connection."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    # (Gloo has no error class; these are messages of its transport and of the socket)
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)
