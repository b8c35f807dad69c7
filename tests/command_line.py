"""The whole command line, called within the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pathspace.cli import main as cli


def load_commands() -> None:
    """Load the commands of the other packages, once."""
    if not any(
        command.callback.__name__ == "report"
        for command in cli.app.registered_commands
        if command.callback
    ):
        cli.load_extensions()


def call(*words: object) -> Result:
    """Run one command line."""
    load_commands()
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "100"})


def refused(line: str, *words: str) -> None:
    """A command line is refused in one sentence with these words, and no file is touched."""
    before = _times()
    result = call(*line.split())
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert "Internal" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert _times() == before


def _times() -> dict[Path, int]:
    """When each file below the current folder was written."""
    return {
        path: path.stat().st_mtime_ns
        for path in Path().rglob("*")
        if "__pycache__" not in path.parts
    }


def importable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str
) -> Iterator[Path]:
    """Make a folder with a module in it the current one; its imports are forgotten afterwards."""
    (folder / f"{module}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
