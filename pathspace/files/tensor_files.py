"""Files in the safetensors format, read and written in pieces.

The format is a length, a JSON header and the tensors one after the other. The safetensors
library maps whole files into memory and writes only from memory, which is impossible for
models larger than the memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..errors import InputError
from .writing import existing_file

TYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
}
# bytes: half of 32 MB, from which on every allocation takes fresh pages, and a little less
PIECE = 15 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file (``start`` is -1 in one that is not written yet)."""

    kind: str
    shape: tuple[int, ...]
    size: int
    start: int = -1

    @classmethod
    def of(cls, dtype: torch.dtype, shape: Iterable[int]) -> StoredTensor:
        """The entry of a tensor to write."""
        shape = tuple(shape)
        kind = next(name for name, each in TYPES.items() if each == dtype)
        return cls(kind, shape, prod(shape) * dtype.itemsize)

    @property
    def dtype(self) -> torch.dtype | None:
        """Its type, or ``None`` for a type that this module can only copy."""
        return TYPES.get(self.kind)

    @property
    def itemsize(self) -> int:
        """Bytes of one scalar, or 1 for a type that this module can only copy."""
        return 1 if self.dtype is None else self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """An existing file: its tensors by name, and its metadata."""

    path: Path
    entries: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TensorFile:
        """Read the header of a file, which the safetensors library accepts."""
        path = Path(path)
        try:
            with open(path, "rb") as file:
                with safe_open(path, "pt"):
                    # (it reads the header alone, and checks every entry)
                    length = struct.unpack("<Q", file.read(8))[0]
                header: dict[str, Any] = json.loads(file.read(length))
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"The file '{path}' cannot be read as a safetensors file ({error}); give one"
                " written by safetensors.torch.save_file."
            ) from error
        metadata = header.pop("__metadata__", None) or {}
        entries = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            place = 8 + length + first
            entries[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), last - first, place)
        return cls(path, entries, metadata)

    def pieces(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """A tensor in slices along its first dimension, each with its position."""
        entry = self.entries[name]
        assert entry.dtype is not None
        rows = entry.shape[0] if entry.shape else 1
        step = max(1, PIECE * rows // max(entry.size, 1))
        with open(self.path, "rb") as file:
            file.seek(entry.start)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                data = np.fromfile(file, np.uint8, entry.size * count // max(rows, 1))
                shape = (count, *entry.shape[1:]) if entry.shape else ()
                values = torch.from_numpy(data).view(entry.dtype if len(data) else torch.uint8)
                yield slice(first, first + count), values.to(entry.dtype).reshape(shape)

    def raw(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor of any type, in pieces."""
        entry = self.entries[name]
        with open(self.path, "rb") as file:
            file.seek(entry.start)
            for first in range(0, entry.size, PIECE):
                yield file.read(min(PIECE, entry.size - first))


def read_saved(path: str | os.PathLike[str], owner: str = "Reading tensors") -> Any:
    """Read a file from ``safetensors``, ``numpy.save`` or ``torch.save``; code in it is not run."""
    file = existing_file(path, owner, "check the path")
    try:
        if file.suffix == ".npy":
            return torch.from_numpy(np.load(file, allow_pickle=False))
        if file.suffix == ".safetensors":
            return load_file(file)
        return torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a file of another format can raise any exception
        raise InputError(
            f"'{file}' cannot be read as tensors alone ({type(error).__name__}); write it again"
            " with safetensors, numpy.save, or torch.save(model.state_dict(), ...)."
        ) from error


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in C order, without a copy if it is stored so."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write(
    path: str | os.PathLike[str],
    entries: Mapping[str, StoredTensor],
    data: Callable[[str], Iterable[bytes | memoryview]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file tensor by tensor; ``data`` yields a tensor's bytes in pieces, by its name."""
    # readers expect every tensor aligned to its type, so the widest types come first
    order = sorted(entries, key=lambda name: (-entries[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + entries[name].size
        header[name] = {
            "dtype": entries[name].kind,
            "shape": list(entries[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            for piece in data(name):
                file.write(piece)
