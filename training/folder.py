"""The files of a run: the first process writes each file under a temporary name and renames it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric

from pathspace.errors import InputError
from pathspace.files.writing import make_folder

from . import ranks
from .checkpoint import load_checkpoint, save_checkpoint, write_tensors
from .history import History


class RunFolder:
    """The folder of a run; without a path nothing is written.

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

    def write_best(self, kept: Mapping[str, Any]) -> None:
        """Write ``best.pt``.

        Args:
            kept: ``kept`` of :class:`pathspace.training.stopping.BestWeights`.

        Raises:
            InputError: the file cannot be written.
        """
        path = self.path
        if path is not None:
            ranks.first(self.fabric, lambda: write_tensors(path / "best.pt", kept))

    def save(self, state: Mapping[str, Any]) -> None:
        """Write ``checkpoint.pt``.

        Args:
            state: see :func:`pathspace.training.checkpoint.save_checkpoint`.

        Raises:
            InputError: the file cannot be written.
        """
        if self.checkpoint is not None:
            save_checkpoint(self.fabric, self.checkpoint, state)

    def load(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Read ``checkpoint.pt``.

        Args:
            settings: the settings of this run.

        Returns:
            The saved state.

        Raises:
            InputError: there is no checkpoint, it is damaged, or it was written by a
                run with other settings.
        """
        if self.checkpoint is None:
            raise InputError(
                "A run without a folder has no checkpoint to resume from; give it a folder."
            )
        return load_checkpoint(self.fabric, self.checkpoint, settings)
