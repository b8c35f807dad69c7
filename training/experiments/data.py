"""Data sets in Debian packages: ``pathspace data fetch NAME`` downloads,
checks and unpacks them.
"""

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

from pathspace.errors import InputError, expect_known
from pathspace.files import make_folder


@dataclass(frozen=True)
class Source:
    """Data in a Debian package.

    Args:
        about: a short description.
        package: name of the package; ``apt-get download`` works for every user.
        licence: of the data.
        files: path inside the package -> SHA-256 of the file.
        symbols: of a text, how many characters its alphabet has.
    """

    about: str
    package: str
    licence: str
    files: Mapping[str, str]
    symbols: int = 0


_FILE = resources.files("pathspace.training.experiments") / "sources.toml"
SOURCES = {
    name: Source(**entry)
    for name, entry in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}


def data_folder(name: str) -> Path:
    """The folder of fetched data: ``$XDG_CACHE_HOME/pathspace/NAME``, by
    default in ``~/.cache``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pathspace" / name


def source(name: str) -> Source:
    """Return the source of this name.

    Raises:
        InputError: there is none.

    Example:
        >>> source("bible").licence
        'public domain'
    """
    expect_known("data set", name, SOURCES)
    return SOURCES[name]


def fetch(name: str, folder: Path | None = None) -> Path:
    """Download a data set, check every file against its digest, and put the files into a folder.

    Args:
        name: one of ``SOURCES``.
        folder: the destination; by default :func:`data_folder`.

    Returns:
        The folder. Existing files with the right digest are not downloaded again.

    Raises:
        InputError: there is no such data set, it cannot be downloaded, or a
            file has another digest.
    """
    wanted = source(name)
    folder = make_folder(folder or data_folder(name))
    if all(_digest(folder / Path(path).name) == digest for path, digest in wanted.files.items()):
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = Path(temporary) / "unpacked"
        _run(["apt-get", "download", wanted.package], temporary, name)
        archives = list(Path(temporary).glob("*.deb"))
        _run(["dpkg-deb", "-x", *map(str, archives[:1]), str(unpacked)], temporary, name)
        for path, digest in wanted.files.items():
            found = _digest(unpacked / path)
            if found != digest:
                raise InputError(
                    f"The file '{path}' of the package {wanted.package} has the digest"
                    f" {found or 'of no file'}, expected {digest}; its contents have changed, so"
                    " figures would not be comparable."
                )
        for path in wanted.files:
            shutil.copyfile(unpacked / path, folder / Path(path).name)
    return folder


def given(task: str, data: str | None, name: str) -> Path:
    """Return the folder that the user gave, or that of fetched data.

    Args:
        task: name of the task, for the error text.
        data: the user's folder.
        name: one of ``SOURCES``.

    Raises:
        InputError: no folder was given, and nothing was fetched.
    """
    if data is not None:
        return Path(data)
    folder = data_folder(name)
    if not all((folder / Path(path).name).is_file() for path in source(name).files):
        raise InputError(
            f"Task '{task}' needs {source(name).about}: run 'pathspace data fetch {name}' once, or"
            " give a folder with --data DIR."
        )
    return folder


def bible_text(path: Path) -> str:
    """Read the text in the format of Debian's package: windows of 64 KiB, each
    packed like ``compress`` does.

    The file has a header (``EC02``, at byte 88 the number of windows and then where each begins,
    big-endian); the three bytes that begin the first window stand for all.

    Args:
        path: the file ``bible.data``.

    Returns:
        The verses, one a line, each after its book, chapter and number.

    Raises:
        InputError: it is no such file, or there is no program to unpack it.
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


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _run(command: list[str], folder: str, name: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise InputError(
            f"Data set '{name}' comes as the Debian package {source(name).package}, and there is no"
            f" {command[0]} here: unpack the package elsewhere and give its files with --data DIR."
        ) from error
    if done.returncode:
        said = " ".join(done.stderr.split()).rstrip(".")
        raise InputError(
            f"{command[0]} could not bring the package {source(name).package} ({said}); run"
            " 'apt-get update' first."
        )
