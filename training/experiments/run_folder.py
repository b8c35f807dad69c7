"""What a run keeps in its folder: checkpoints, logs, and the epoch that was best."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

from pathspace.errors import InputError
from pathspace.files.writing import make_folder, replacing

# A killed run loses at most this much work.
CHECKPOINT_SECONDS = 30.0
BEST, LAST = "best.ckpt", "last.ckpt"
UNREADABLE = (
    *(OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)


class _Patience(EarlyStopping):
    """A run that had stopped stays so when it is resumed, unless it is given more patience."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, _module: Any) -> None:
        trainer.should_stop = self.wait_count >= self.patience


class _InsideEpochs(ModelCheckpoint):
    """Checkpoints by time, at ends of steps; that of a whole epoch has to wait for validation."""

    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:
        *_, index = others
        if (index + 1) % trainer.accumulate_grad_batches == 0 and not trainer.is_last_batch:
            super().on_train_batch_end(trainer, *others)


class _WholeFiles(TorchCheckpointIO):
    """Checkpoints appear whole or not at all, also on a full disk or when the run is killed."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        with replacing(path) as temporary:
            super().save_checkpoint(checkpoint, temporary, storage_options)


def kept(metric: str, folder: Path, patience: int | None, tensorboard: bool) -> dict[str, Any]:
    """Return the arguments of Lightning's trainer that keep a run in a folder."""
    if tensorboard and not find_spec("tensorboard"):
        raise InputError("TensorBoard is not installed; run pip install tensorboard.")
    place: dict[str, Any] = {"dirpath": make_folder(folder), "enable_version_counter": False}
    best, last = ({**place, "filename": Path(name).stem} for name in (BEST, LAST))
    every = timedelta(seconds=CHECKPOINT_SECONDS)
    callbacks = [
        *([_Patience(metric, patience=patience)] if patience else []),
        ModelCheckpoint(**best, monitor=metric, save_weights_only=True),
        ModelCheckpoint(**last, save_on_train_epoch_end=True),
        _InsideEpochs(**last, train_time_interval=every),
    ]
    logs: list[Any] = [CSVLogger(folder, "", "", flush_logs_every_n_steps=1)]
    if tensorboard:
        logs.append(TensorBoardLogger(folder / "tensorboard", "", "", default_hp_metric=False))
    return {"callbacks": callbacks, "logger": logs, "plugins": [_WholeFiles()]}


def expect_own(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that is damaged, or of another run."""
    if not path.is_file():
        raise InputError(f"There is no checkpoint '{path}' to resume from; start without --resume.")
    try:
        with zipfile.ZipFile(path) as archive:
            # (torch writes checksums, but does not check them)
            whole = archive.testzip() is None
        # weights_only, because a checkpoint from elsewhere must not run code
        saved = torch.load(path, map_location="cpu", weights_only=True) if whole else {}
        other = saved["run"]["settings"]
    except UNREADABLE as error:
        raise InputError(
            f"The checkpoint '{path}' cannot be read: it is damaged, or of another version of"
            " pathspace; start without --resume."
        ) from error
    for key in sorted({*other, *settings}):
        asked = settings.get(key)
        if other.get(key) != asked:
            raise InputError(
                f"The checkpoint '{path}' was written with {key} = {other.get(key)}, this run"
                f" asks for {key} = {asked}; resume with the same settings or choose another"
                " folder."
            )
