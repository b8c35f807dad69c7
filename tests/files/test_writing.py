"""Files are replaced whole or not at all, and every failure to write is one sentence."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pathspace.errors import InputError
from pathspace.files.writing import ensure_writable, replacing


def sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The message, after checking that it is one sentence on one line."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert ". " not in text
    return text


def write(path: Path | str, text: str = "new") -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def test_the_body_writes_a_sibling_that_becomes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with replacing(path) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".json"
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_body_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing/out.json", "does not exist"),
        ("missing/deeper/out.json", "does not exist"),
        ("folder", "it is a folder"),
        ("folder/", "names a folder"),
        ("new/", "names a folder"),
        ("file/out.json", "is a file, not a folder"),
        ("file/deeper/out.json", "does not exist"),
        ("loop", "symbolic links"),
        ("fifo", "a device or a pipe"),
        ("/dev/full", "a device or a pipe"),
        ("/dev/null", "a device or a pipe"),
        ("/proc/out.json", "no file can be created in '/proc'"),
        ("/proc/self/mem", "Cannot write"),
        ("x" * 300 + ".json", "too long"),
        ("", "it is a folder"),
        ("a\0b", "null byte"),
    ],
)
@pytest.mark.parametrize("action", [write, ensure_writable])
def test_what_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: object, path: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(InputError) as error:
        action(path)  # type: ignore[operator]
    assert said in sentence(error)
    assert f"Cannot write {path!r}" in sentence(error)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_text() == "old"
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "no space left on device"), (errno.EIO, "input/output error")],
)
def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError) as error:
        write(path)
    assert said in sentence(error)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_write_error_of_safetensors_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "masks.safetensors"
    with pytest.raises(InputError) as error, replacing(path) as temporary:
        # safetensors wraps the system's error in one of its own
        save_file({"mask": torch.ones(2)}, temporary / "under-a-file")
    assert str(path) in sentence(error)
    assert os.listdir(tmp_path) == []


def test_a_write_protected_file_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    path.chmod(0o444)
    # The superuser may write anything, so ask the permission bits instead of the system.
    monkeypatch.setattr(
        os, "access", lambda file, _mode: bool(os.stat(file).st_mode & stat.S_IWUSR)
    )
    with pytest.raises(InputError) as error:
        write(path)
    assert "write-protected" in sentence(error)
    assert path.read_text() == "old"


def test_permissions_follow_the_old_file_or_the_umask(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("old")
    old.chmod(0o604)
    previous = os.umask(0o027)
    try:
        write(old)
        write(tmp_path / "new.json")
    finally:
        os.umask(previous)
    assert stat.S_IMODE(old.stat().st_mode) == 0o604
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o640


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "real" / "out.json")
    write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real" / "out.json").read_text() == "new"


def test_the_longest_allowed_name_is_written(tmp_path: Path) -> None:
    write(tmp_path / ("x" * 250 + ".json"))
    assert len(os.listdir(tmp_path)) == 1
