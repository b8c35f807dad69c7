"""Metrics for TensorBoard, which is optional: ``pip install tensorboard``."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from lightning_fabric.loggers import TensorBoardLogger  # type: ignore[attr-defined]
from lightning_fabric.loggers.logger import Logger

from pathspace.errors import InputError


class TensorBoard(Logger):
    """A logger for Lightning Fabric that writes event files into a folder, also for resumed runs.

    A resumed run logs the steps after its last checkpoint again; TensorBoard is told to
    drop the earlier values.

    Args:
        folder: the folder of the event files.

    Raises:
        InputError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not find_spec("tensorboard"):
            raise InputError(
                "TensorBoard is not installed; run pip install tensorboard, or do not pass"
                " --tensorboard."
            )
        self.folder = os.fspath(folder)
        self._logger: TensorBoardLogger | None = None

    @property
    def name(self) -> str:
        """The folder."""
        return self.folder

    @property
    def version(self) -> str:
        """There is one version."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write numbers of one step.

        Args:
            metrics: numbers by name.
            step: optimizer steps done.
        """
        if self._logger is None:
            self._logger = TensorBoardLogger(self.folder, name="", version="", purge_step=step)
        self._logger.log_metrics(dict(metrics), step)
        self._logger.save()

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Hyperparameters are in the configuration beside the folder."""

    def finalize(self, status: str) -> None:
        """Close the files.

        Args:
            status: passed on.
        """
        if self._logger is not None:
            self._logger.finalize(status)
