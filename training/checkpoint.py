"""Checkpoints: everything the next step depends on, so that a resumed run
equals one never interrupted.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from pathspace.errors import InputError
from pathspace.files.writing import replacing

from . import ranks
from .history import EpochRecord, History, Partial
from .stopping import exhausted

FORMAT = 4
CONTENTS = (
    *("settings", "epochs", "patience", "records", "partial"),
    *("model", "best", "optimizer", "scaler", "order", "noise", "watch"),
)


def save_checkpoint(fabric: Fabric, path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a checkpoint beside ``path`` and rename it, so that a crash
    never costs the previous one.

    Args:
        fabric: the processes; the first of them writes.
        path: the file.
        state: the keys of ``CONTENTS`` and ``"penal_steps"``, the steps of schedules of penal
            connections, which files of earlier versions lack. Plain values: the settings of the
            run, the number of epochs, the patience, the records so far and the part of an epoch
            after them. States: those of the module now and after its best epoch, of optimizer, loss
            scaler and watcher. Random states: that of the order of the batches at the start of the
            current epoch, and all others now, for every process (:func:`noise_state`).

    Raises:
        InputError: the file cannot be written.
    """
    ranks.first(fabric, lambda: write_tensors(path, {"format": FORMAT, **state}))


def write_tensors(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write tensors and plain values as one file; an existing file is replaced
    completely or not at all.

    Args:
        path: the file.
        state: the argument of ``torch.save``.

    Raises:
        InputError: the file cannot be written.
    """
    # (in memory first, because torch reports a full disk by a special error)
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    with replacing(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def load_checkpoint(
    fabric: Fabric, path: str | os.PathLike[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Read a checkpoint and make sure that it belongs to this run.

    Args:
        fabric: the processes; the first of them reads.
        path: the file.
        settings: the settings of this run, which must be those of the checkpoint.

    Returns:
        The saved state; modules and optimizers as state dictionaries.

    Raises:
        InputError: there is no such file, it is damaged, or it was written by a
            run with other settings.
    """
    state = ranks.first(fabric, lambda: _read(path))
    saved = state["settings"]
    for key in sorted({*saved, *settings}):
        if saved.get(key) != settings.get(key):
            raise InputError(
                f"The checkpoint '{path}' was written with {key} = {saved.get(key)}, this run asks"
                f" for {key} = {settings.get(key)}; resume with the same settings or choose another"
                " folder."
            )
    return state


def protect_unfinished(path: str | os.PathLike[str]) -> None:
    """Refuse to overwrite an interrupted run, so that a forgotten option does not lose its epochs.

    Args:
        path: the file; a missing file, or one that cannot be resumed, is not protected.

    Raises:
        InputError: the checkpoint belongs to an unfinished run.
    """
    try:
        state = _read(path)
    except InputError:
        return
    done, wanted, more = len(state["records"]), state["epochs"], state["partial"]["steps"]
    history = History(tuple(EpochRecord(**record) for record in state["records"]))
    if done < wanted and not exhausted(history, state["patience"]):
        raise InputError(
            f"The checkpoint '{path}' is that of an unfinished run, {done} of {wanted}"
            f" epochs{f' and {more} steps' if more else ''}; add --resume to continue it,"
            " --overwrite to start a new run, or choose another --out."
        )


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not Path(path).is_file():
        raise InputError(f"There is no checkpoint '{path}' to resume from; start without --resume.")
    damaged = (
        f"The checkpoint '{path}' cannot be read: it is damaged or no checkpoint; start without"
        " --resume."
    )
    try:
        # check the checksums, which torch writes but does not check
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise InputError(damaged)
        # weights_only, because a checkpoint from elsewhere must not run code
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (
        *(OSError, EOFError, RuntimeError, ValueError, KeyError),
        *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
    ) as error:
        raise InputError(damaged) from error
    if (
        not isinstance(state, dict)
        or state.get("format") != FORMAT
        or not set(CONTENTS) <= state.keys()
        or not _readable(state)
    ):
        raise InputError(
            f"The file '{path}' is not a checkpoint of this version of pathspace; start without"
            " --resume."
        )
    return state


def _readable(state: Mapping[str, Any]) -> bool:
    """Whether records, settings and numbers have the form in which they are written."""
    best = state["best"]
    try:
        records = [EpochRecord(**record) for record in state["records"]]
        done = Partial(**state["partial"])
    except TypeError:
        return False
    return (
        isinstance(state["settings"], dict)
        and isinstance(state["epochs"], int)
        and isinstance(state["noise"], list)
        and (best is None or (isinstance(best, dict) and {"epoch", "metric", "model"} <= {*best}))
        and all(isinstance(record.epoch, int) for record in records)
        and isinstance(done.steps, int)
    )


def noise_state(device: torch.device) -> dict[str, Any]:
    """Return the state of torch's global random numbers (dropout, for example), of
    the CPU and of one device.
    """
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_noise(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a result of :func:`noise_state`; a device that was not used then is not changed."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
