"""Readers of idx files, pickled batches and texts; a failure is a sentence with the way out."""

from __future__ import annotations

import gzip
import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from pathspace.errors import InputError

# The element types of an idx file, by its third byte; numbers are big-endian.
IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def own_folder(task: str, data: str | None, hint: str) -> Path:
    """Return the folder that the user gave for a task."""
    if data is None:
        raise InputError(
            f"Task '{task}' reads data of yours: give its folder with --data DIR; {hint}."
        )
    return Path(data)


def find(folder: Path, names: tuple[str, ...], hint: str) -> Path:
    """Return the first of several files that exists, packed by gzip or not."""
    if not folder.is_dir():
        raise InputError(f"There is no folder '{folder}'; {hint}.")
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise InputError(f"The folder '{folder}' has no file '{names[0]}'; {hint}.")


def read_bytes(path: Path, hint: str) -> bytes:
    """Return a file's contents, unpacked if its name ends in ``.gz``."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"The file '{path}' cannot be read, it may be cut off; {hint}.") from error


def read_idx(path: Path, hint: str) -> np.ndarray:
    """Read an idx file: two zero bytes, type, number of axes, their lengths, the numbers."""
    data = read_bytes(path, hint)
    try:
        zeros, kind, start = data[:2], np.dtype(IDX_TYPES[data[2]]), 4 + 4 * data[3]
        lengths = np.frombuffer(data[4:start], ">u4")
        array = np.frombuffer(data, kind, offset=start).reshape(lengths)
    except (LookupError, ValueError) as error:
        raise InputError(f"The file '{path}' is not a whole idx file; {hint}.") from error
    if zeros != b"\0\0":
        raise InputError(f"The file '{path}' is not an idx file; {hint}.")
    return array.astype(kind.newbyteorder("="))


# What numpy itself names in the pickle of an array, wherever this version keeps it.
_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]


class _ArraysOnly(pickle.Unpickler):
    """Unpickle dictionaries of arrays, lists and texts; all other contents are errors."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".", maxsplit=1)[0] == "numpy" and name in self.ALLOWED:
            # Files of 2009 contain a module name that later versions of numpy have changed.
            return _RECONSTRUCT if name == "_reconstruct" else getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return lambda text, _code: text.encode("latin1")
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_batch(path: Path, labels: str, hint: str) -> tuple[np.ndarray, np.ndarray]:
    """Read one of CIFAR's python batches: a pickled dictionary with pixels and labels."""
    try:
        # latin1 turns the byte strings of Python 2 into texts without loss.
        batch = _ArraysOnly(io.BytesIO(read_bytes(path, hint)), encoding="latin1").load()
        batch = {
            key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()
        }
        pixels, found = np.asarray(batch["data"]), np.asarray(batch[labels], dtype=np.int64)
        if pixels.dtype != np.uint8 or pixels.shape != (len(found), 3072):
            raise ValueError
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"The file '{path}' is not a python batch with data and {labels}, or it is cut off;"
            f" {hint}."
        ) from error
    return pixels.reshape(-1, 3, 32, 32), found


def read_text(path: Path, hint: str) -> str:
    """Read a text in UTF-8."""
    try:
        text = read_bytes(path, hint).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"The file '{path}' is not a text in UTF-8 (byte {error.start}); {hint}."
        ) from error
    if not text.strip():
        raise InputError(f"The file '{path}' is empty; {hint}.")
    return text
