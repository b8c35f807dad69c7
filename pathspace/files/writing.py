"""Write files so that a failure never damages an existing file."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors import SafetensorError

from ..errors import InputError, InputTypeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STDOUT = "-"
# what a format would say of the time or of the version that wrote it
LEFT_OUT = {".svg": {"Date": None}, ".png": {"Software": None}, ".pdf": {"CreationDate": None}}
FORMATS = tuple(LEFT_OUT)


def ensure_writable(*paths: str | os.PathLike[str] | None) -> None:
    """Fail now, rather than after a long computation, if one of these files cannot be written.

    An empty sibling file is created and removed again; an existing file is not touched. ``-`` is
    standard output, ``None`` is nowhere.
    """
    for path in paths:
        if path is not None and path != STDOUT:
            _create_sibling(path, _destination(path)).unlink(missing_ok=True)


def expect_outputs(
    owner: str, output: str | None, suffixes: Sequence[str] = (), *others: str | None
) -> None:
    """Fail before any work if what a command writes cannot be delivered as asked."""
    given = [path for path in (output, *others) if path is not None]
    places = [STDOUT if path == STDOUT else os.path.realpath(path) for path in given]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        where = "on standard output" if twice == STDOUT else f"in the file '{twice}'"
        raise InputError(f"{owner} was asked for two results {where}; give each a file of its own.")
    ensure_writable(*given)
    if output is not None and output != STDOUT and suffixes:
        expect_suffix(output, owner, suffixes)


def expect_path(path: object, owner: str) -> None:
    """Refuse what names no file, such as a model given in its place."""
    if not isinstance(path, str | os.PathLike):
        raise InputTypeError(
            f"{owner} found a {type(path).__name__} as the name of a file, expected a string or a"
            " path; check the order of the arguments."
        )


def existing_file(path: str | os.PathLike[str], owner: str, way_out: str) -> Path:
    """Return a path that names a file which can be read, or say the way out."""
    expect_path(path, owner)
    name = os.fspath(path)
    if Path(path).is_dir():
        raise InputError(f"{owner} found the folder {name!r}, expected a file; {way_out}.")
    if not Path(path).is_file():
        raise InputError(f"{owner} found no file {name!r}; {way_out}.")
    return Path(path)


def expect_suffix(path: str | os.PathLike[str], owner: str, suffixes: Sequence[str]) -> None:
    """Refuse a file name that promises another format, or none."""
    expect_path(path, owner)
    if Path(path).suffix.lower() not in suffixes:
        raise InputError(
            f"{owner} found the file {os.fspath(path)!r}, expected a name ending in"
            f" {', '.join(suffixes)}; rename it."
        )


@contextmanager
def delivering(path: str, suffix: str) -> Iterator[Path]:
    """Yield a file that becomes ``path`` when the body succeeds; ``-`` is standard output."""
    if path != STDOUT:
        with replacing(path) as temporary:
            yield temporary
        return
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / f"output{suffix}"
        yield temporary
        sys.stdout.flush()
        sys.stdout.buffer.write(temporary.read_bytes())
        sys.stdout.buffer.flush()


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """Create a folder, its parents included, unless it is there already."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"Cannot make the folder '{path}': {_reason(error)}; choose another."
        ) from error
    return path


@contextmanager
def replacing(path: str | os.PathLike[str], alone: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of ``path`` that becomes ``path`` when the body succeeds.

    Until the final rename, which is atomic, whatever was at ``path`` stays whole; if the body
    raises, the sibling is removed. The sibling keeps the suffix of ``path``, a link is followed,
    and an existing file's permissions are kept. The body should do nothing but write: an
    ``OSError`` raised in it is reported as a failure to write ``path``. If nobody else writes this
    file (``alone``), a link is replaced, not followed, and what killed runs left beside it is
    removed.
    """
    destination = _destination(path, follow=not alone)
    temporary = _create_sibling(path, destination)
    mode = stat.S_IMODE(temporary.stat().st_mode)
    try:
        yield temporary
        # what writes may have put a file of its own, with other permissions, in the place of ours
        kept = destination.exists() and not destination.is_symlink()
        temporary.chmod(stat.S_IMODE(destination.stat().st_mode) if kept else mode)
        # Some file systems report a full disk only when asked to make the data durable.
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, destination)
        for left in destination.parent.glob(f"{_mark(destination)}*") if alone else ():
            left.unlink()
    except (OSError, SafetensorError) as error:
        raise _cannot_write(path, _reason(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(text: str, path: str | None) -> None:
    """Write a text and a line end; ``-`` is standard output, ``None`` is nowhere."""
    if path == STDOUT:
        print(text)
    elif path is not None:
        with replacing(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")


def save_picture(
    figure: Figure, path: str | os.PathLike[str], dpi: float | Literal["figure"] = "figure"
) -> Path:
    """Write a figure in the format of the suffix (``.svg``, ``.png``, ``.pdf``), without a date."""
    import matplotlib

    expect_suffix(path, "save_picture", FORMATS)
    suffix = Path(path).suffix.lower()
    # (names of parts of an SVG are random without a salt)
    with matplotlib.rc_context({"svg.hashsalt": "pathspace"}), replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format=suffix[1:], metadata=LEFT_OUT[suffix])
    return Path(path)


def _destination(path: str | os.PathLike[str], follow: bool = True) -> Path:
    """The real file behind ``path``, after every check that needs no writing."""
    expect_path(path, "Writing a file")
    text = os.fspath(path)
    try:
        real = os.path.realpath(text if follow else os.path.dirname(text))
        destination = Path(real) if follow else Path(real, os.path.basename(text))
        mode = os.stat(destination).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = stat.S_IFREG
    except (OSError, ValueError) as error:
        raise _cannot_write(path, _reason(error)) from error
    folder, name = destination.parent, "add a file name"
    no_folder = "is a file, not a folder" if folder.exists() else "does not exist"
    locked = destination.exists() and not os.access(destination, os.W_OK)
    for wrong, reason, way_out in (
        (text.endswith(os.sep), "a path that ends with a slash names a folder", name),
        (not folder.is_dir(), f"the folder '{folder}' {no_folder}", "create it first"),
        (stat.S_ISDIR(mode), "it is a folder", name),
        # (renaming over a device or a pipe would destroy it)
        (not stat.S_ISREG(mode), "it is a device or a pipe", "choose a regular file"),
        (locked, "the file is write-protected", "choose another place"),
    ):
        if wrong:
            raise _cannot_write(path, reason, way_out)
    return destination


def _create_sibling(path: str | os.PathLike[str], destination: Path) -> Path:
    own = f"{_mark(destination)}{secrets.token_hex(3)}{destination.suffix}"
    temporary = destination.parent / own
    try:
        # Created with the user's own umask, unlike the private files of the tempfile module.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise _cannot_write(path, f"no file can be created in '{destination.parent}'") from error
    return temporary


def _mark(destination: Path) -> str:
    """How names of temporary files begin, which is different for each file."""
    return f".pathspace-{hashlib.sha256(destination.name.encode()).hexdigest()[:6]}"


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text[:1].lower() + " ".join(text[1:].split())


def _cannot_write(
    path: str | os.PathLike[str], reason: str, way_out: str = "choose another place"
) -> InputError:
    return InputError(f"Cannot write {os.fspath(path)!r}: {reason}; {way_out}.")
