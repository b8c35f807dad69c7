"""Data sets in packages of Debian: ``pathspace data fetch NAME`` brings, checks, unpacks them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pathspace.errors import InputError
from pathspace.files.writing import make_folder

from .names import expect_known


@dataclass(frozen=True)
class Source:
    """Data in packages of Debian: path in each -> SHA-256; ``symbols`` of a text's alphabet."""

    about: str
    licence: str
    debian: Mapping[str, Mapping[str, str]]
    symbols: int = 0

    @property
    def files(self) -> dict[str, str]:
        """Name of each file in the folder of the data -> its SHA-256."""
        found = [pair for files in self.debian.values() for pair in files.items()]
        return {Path(path).name: digest for path, digest in found}

    @property
    def place(self) -> str:
        """Where the data comes from, in words."""
        count = len(self.debian)
        return f"Debian: {next(iter(self.debian)) if count == 1 else f'{count} packages'}"


_FILE = resources.files("pathspace.training.experiments") / "sources.toml"
SOURCES = {
    name: Source(**entry)
    for name, entry in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}


def data_folder(name: str) -> Path:
    """The folder of fetched data, ``$XDG_CACHE_HOME/pathspace/NAME`` or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pathspace" / name


def source(name: str) -> Source:
    """Return the source of this name."""
    expect_known("data set", name, SOURCES)
    return SOURCES[name]


def fetched(name: str) -> Path | None:
    """Return the folder of fetched data, or ``None`` if a file is missing there."""
    folder = data_folder(name)
    return folder if all((folder / file).is_file() for file in source(name).files) else None


def fetch(name: str, folder: Path | None = None) -> Path:
    """Download a data set, check every file against its digest, and put the files into a folder."""
    wanted = source(name)
    folder = make_folder(folder or data_folder(name))
    if all(digest_of(folder / file) == digest for file, digest in wanted.files.items()):
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = Path(temporary) / "unpacked"
        _run(["apt-get", "download", *wanted.debian], temporary, wanted)
        for archive in Path(temporary).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(archive), str(unpacked)], temporary, wanted)
        files = [pair for some in wanted.debian.values() for pair in some.items()]
        paths = [(unpacked / path, digest) for path, digest in files]
        for path, digest in paths:
            found = digest_of(path)
            if found != digest:
                raise InputError(
                    f"The file '{path.name}' of {wanted.place} has the digest"
                    f" {found or 'of no file'}, expected {digest}; its contents have changed,"
                    " so figures would not be comparable: to use it all the same, give its"
                    " folder with --data DIR."
                )
        for path, _ in paths:
            shutil.copyfile(path, folder / path.name)
    return folder


def given(task: str, data: str | None, name: str) -> Path:
    """Return the folder that the user gave, or that of fetched data."""
    if data is not None:
        return Path(data)
    folder = fetched(name)
    if folder is None:
        raise InputError(
            f"Task '{task}' needs {source(name).about}: run 'pathspace data fetch {name}' once, or"
            " give a folder with --data DIR."
        )
    return folder


def bible_text(path: Path) -> str:
    """Read the text of Debian's package: windows of 64 KiB, each packed like ``compress`` does. The
    file has a header (``EC02``, at byte 88 the number of windows and then where each begins,
    big-endian); the three bytes that begin the first window stand for all.
    """
    content = path.read_bytes()
    if content[:4] != b"EC02":
        raise InputError(
            f"The file '{path}' begins with {content[:4]!r}, expected b'EC02'; fetch it again."
        )
    count = int.from_bytes(content[88:92], "big")
    starts = [int.from_bytes(content[92 + 4 * i : 96 + 4 * i], "big") for i in range(count)]
    windows = [content[a:b] for a, b in zip(starts, [*starts[1:], len(content)], strict=True)]
    program = shutil.which("gzip")
    if program is None:
        raise InputError(
            f"The file '{path}' is packed, and there is no program gzip to unpack it; install gzip."
        )
    parts = (
        subprocess.run(
            [program, "-dc"], input=b"\x1f\x9d\x90" + w, capture_output=True, check=False
        ).stdout
        for w in windows
    )
    return b"".join(parts).decode("ascii")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, or an empty text if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _run(command: list[str], folder: str, wanted: Source) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise InputError(
            f"The data is in {wanted.place}, and there is no {command[0]} here: unpack elsewhere"
            " and give the files with --data DIR."
        ) from error
    if done.returncode:
        lines = done.stderr.splitlines()
        # (both programs print warnings before the error itself)
        errors = [line for line in lines if line.startswith("E:")] or lines[-1:] or ["no reason"]
        said = " ".join(errors[0].split()).rstrip(".")
        raise InputError(
            f"{command[0]} could not bring {wanted.place} ({said}); check the network, and run"
            " 'apt-get update' first."
        )
