"""Checkpoints on disk: one safetensors file, or a folder with several and their index."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import InputError
from .tensor_files import TensorFile, as_bytes, write
from .writing import ensure_writable, expect_path, make_folder, replacing

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
JOURNAL = ".pathspace-unfinished.json"
# files beside a checkpoint that hold weights in other formats
WEIGHTS = frozenset([".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf"])
# what wrappers put into names
WRAPPERS = frozenset(["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])

Change = Callable[[slice, Tensor], Tensor]


def bare(name: str) -> str:
    """A parameter's name without what wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, each in one of the files.

    Attributes:
        path: the file or folder.
        files: the files, in order.
        index: the file of the index, for a checkpoint in several files.
    """

    path: Path
    files: tuple[TensorFile, ...]
    index: Path | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the headers of a file of tensors, or of those in a folder."""
        expect_path(path, "Checkpoint.open")
        path = Path(path)
        if path.is_file() and path.name.endswith(".index.json"):
            path = path.parent
        if not path.is_dir():
            return cls(path, (TensorFile.open(path),))
        index = next((one for one in (path / INDEX, *_indices(path)) if one.exists()), None)
        if index is not None:
            try:
                names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
                outside = [name for name in names if Path(name).name != name]
                if outside:
                    raise ValueError(f"{outside[0]!r} is outside of its folder")
            except Exception as error:  # (whatever stands in the file)
                raise InputError(
                    f"The index '{index}' cannot be read ({error}); give a whole checkpoint."
                ) from error
            return cls(path, tuple(TensorFile.open(path / name) for name in names), index)
        single = [path / SINGLE] if (path / SINGLE).exists() else sorted(path.glob("*.safetensors"))
        if len(single) != 1:
            raise InputError(
                f"The folder '{path}' holds {len(single)} files *.safetensors and no index,"
                f" expected {SINGLE} or {INDEX}; give the file."
            )
        return cls(path, (TensorFile.open(single[0]),))

    def places(self) -> dict[str, TensorFile]:
        """Tensor name -> its file."""
        return {name: file for file in self.files for name in file.entries}

    def named(self, names: Mapping[str, Iterable[str]], who: str) -> dict[str, list[str]]:
        """For every tensor of a model (name -> all its names), its names in the checkpoint without
        those of wrappers: several where a shared tensor was stored several times. ``who`` asks.
        """
        held: dict[str, list[str]] = {}
        for name in self.places():
            held.setdefault(bare(name), []).append(name)
        found = {}
        for name, aliases in names.items():
            found[name] = [
                key for alias in dict.fromkeys(map(bare, aliases)) for key in held.get(alias, ())
            ]
            if not found[name]:
                raise InputError(
                    f"{who} found no tensor {name!r} in '{self.path}', which holds"
                    f" {next(iter(held), 'nothing')!r} and {max(len(held) - 1, 0)} others; give the"
                    " checkpoint of the traced model."
                )
        return found

    def rewrite(
        self,
        destination: str | os.PathLike[str],
        changes: Mapping[str, Change],
        job: str,
        added: Mapping[str, str] | None = None,
    ) -> None:
        """Write the checkpoint again, some of its tensors changed piece by piece (``changes``: by
        name, what becomes of a slice), and with new ones (``added``: name -> the one that it is
        made of); ``job`` tells this change from any other.

        Files are written aside and renamed, in the place of a link too; a run that was broken off
        goes on after the last whole file. The index is written last, so that nobody reads half of a
        checkpoint.
        """
        added = added or {}
        destination = Path(destination)
        if destination.resolve() == self.path.resolve():
            raise InputError(
                f"The destination '{destination}' is the source; give another destination."
            )
        if not self.path.is_dir():
            ensure_writable(destination)
            _rewritten(self.files[0], destination, changes, added)
            return
        make_folder(destination)
        journal = destination / JOURNAL
        stamps = [
            [file.path.name, file.path.stat().st_size, file.path.stat().st_mtime_ns]
            for file in self.files
        ]
        own = hashlib.sha256(json.dumps([job, stamps]).encode()).hexdigest()
        done = _finished(journal, own)
        for index in [] if done else _indices(destination):
            index.unlink()
        for file in self.files:
            target = destination / file.path.name
            if file.path.name in done and target.is_file() and not target.is_symlink():
                continue
            _rewritten(file, target, changes, added)
            done.append(file.path.name)
            with replacing(journal, alone=True) as temporary:
                temporary.write_text(json.dumps({"job": own, "files": done}), encoding="utf-8")
        for beside in self.path.iterdir():
            weights = beside.suffix in WEIGHTS or beside.name.endswith(".index.json")
            if beside.is_file() and not weights:
                target = destination / beside.name
                if target.is_symlink():
                    target.unlink()
                shutil.copy2(beside, target)
        if self.index is not None:
            with replacing(destination / self.index.name, alone=True) as temporary:
                temporary.write_text(self._index_with(self.index, added), encoding="utf-8")
        journal.unlink(missing_ok=True)

    def _index_with(self, file: Path, added: Mapping[str, str]) -> str:
        """The text of the index, with new tensors in it."""
        text, places = file.read_text(encoding="utf-8"), self.places()
        if not added:
            return text
        index = json.loads(text)
        for name, source in added.items():
            index["weight_map"][name] = index["weight_map"][source]
            if "total_size" in index.get("metadata", {}):
                index["metadata"]["total_size"] += places[source].entries[source].size
        return json.dumps(index, indent=2) + "\n"


def _indices(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors.index.json"))


def _finished(journal: Path, job: str) -> list[str]:
    """Files that an earlier run of the same job has written whole."""
    try:
        found = json.loads(journal.read_text(encoding="utf-8"))
        return list(found["files"]) if found["job"] == job else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _rewritten(
    file: TensorFile, destination: Path, changes: Mapping[str, Change], added: Mapping[str, str]
) -> None:
    sources = dict(zip(file.entries, file.entries, strict=True))
    sources |= {name: source for name, source in added.items() if source in file.entries}

    def data(name: str) -> Iterator[bytes | memoryview]:
        if name not in changes:
            yield from file.raw(sources[name])
            return
        for place, piece in file.pieces(sources[name]):
            yield as_bytes(changes[name](place, piece))

    entries = {name: file.entries[source] for name, source in sources.items()}
    with replacing(destination, alone=True) as temporary:
        write(temporary, entries, data, file.metadata)
