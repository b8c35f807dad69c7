"""The files of a run. Its checkpoint is everything the next step depends on, so that a resumed run
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
from pathspace.files.writing import make_folder, replacing

from . import ranks
from .history import EpochRecord, History, Partial, exhausted

FORMAT = 4
CONTENTS = (
    *("settings", "epochs", "patience", "records", "partial"),
    *("model", "best", "optimizer", "scaler", "order", "noise", "watch"),
)


class RunFolder:
    """The folder of a run; without a path nothing is written.

    The first process writes every file under a temporary name and renames it, so that a crash never
    costs the previous one.

    Args:
        fabric: the processes.
        path: the folder, created if it does not exist; ``None`` for a run without files.

    Raises:
        InputError: the folder cannot be created.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     folder = RunFolder(Fabric(accelerator="cpu", devices=1), f"{place}/run")
        ...     folder.write_metrics(History(), "error")
        ...     sorted(path.name for path in folder.path.iterdir())
        ['metrics.csv', 'metrics.jsonl']
    """

    def __init__(self, fabric: Fabric, path: str | os.PathLike[str] | None) -> None:
        self.fabric = fabric
        self.path = None if path is None else ranks.first(fabric, lambda: make_folder(path))

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint's path, ``None`` without a folder."""
        return None if self.path is None else self.path / "checkpoint.pt"

    def write_metrics(self, history: History, metric_name: str) -> None:
        """Write ``metrics.csv`` and ``metrics.jsonl``.

        Args:
            history: the epochs so far.
            metric_name: the name of the metric.

        Raises:
            InputError: a file cannot be written.
        """
        path = self.path
        if path is not None:
            ranks.first(self.fabric, lambda: history.write_csv(path / "metrics.csv", metric_name))
            ranks.first(
                self.fabric, lambda: history.write_jsonl(path / "metrics.jsonl", metric_name)
            )

    def write(self, name: str, state: Mapping[str, Any]) -> None:
        """Write tensors and plain values.

        Args:
            name: ``best.pt``, or ``checkpoint.pt`` with a ``"format"``, ``CONTENTS`` and
                ``"penal_steps"``, the steps of schedules of penal connections, which files of
                earlier versions lack. Plain values: the settings of the run, the number of epochs,
                the patience, the records so far and the part of an epoch after them. States: those
                of the module now and after its best epoch, of optimizer, loss scaler and watcher.
                Random states: that of the order of the batches at the start of the current epoch,
                and all others now, for every process (:func:`noise_state`).
            state: by name.

        Raises:
            InputError: the file cannot be written.
        """
        path = self.path
        if path is not None:
            ranks.first(self.fabric, lambda: _write(path / name, state))

    def load(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Read ``checkpoint.pt`` and make sure that it belongs to this run.

        Args:
            settings: the settings of this run, which must be those of the checkpoint.

        Returns:
            The saved state; modules and optimizers as state dictionaries.

        Raises:
            InputError: there is no checkpoint, it is damaged, or it was written by a
                run with other settings.
        """
        path = self.checkpoint
        if path is None:
            raise InputError(
                "A run without a folder has no checkpoint to resume from; give it a folder."
            )
        state = ranks.first(self.fabric, lambda: _read(path))
        saved = state["settings"]
        for key in sorted({*saved, *settings}):
            if saved.get(key) != settings.get(key):
                raise InputError(
                    f"The checkpoint '{path}' was written with {key} = {saved.get(key)}, this run"
                    f" asks for {key} = {settings.get(key)}; resume with the same settings or"
                    " choose another folder."
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


def _write(path: Path, state: Mapping[str, Any]) -> None:
    # (in memory first, because torch reports a full disk by a special error)
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    with replacing(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


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
