"""The line at the end of a command that says what to type next."""

from __future__ import annotations

import shlex
from importlib.metadata import entry_points
from pathlib import Path
from string import Formatter

import pytest
from command_line import load_commands
from typer import Typer
from typer.main import get_command
from typer.testing import CliRunner

from pathspace.cli import main as cli
from pathspace.cli.errors import STEPS, next_step
from pathspace.training.experiments.data import SOURCES

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 2))
"""
TERMINAL = {"TTY_COMPATIBLE": "1", "COLUMNS": "100"}


def commands() -> dict[str, object]:
    others = Typer()
    for point in entry_points(group="pathspace.commands"):
        point.load()(others)
    return get_command(cli.app).commands | get_command(others).commands


def find(known: dict[str, object], words: list[str]) -> tuple[object, list[str]]:
    """The command that a line begins with, and the words after it."""
    command, words = known[words[0]], words[1:]
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def test_every_command_has_a_next_one_but_the_demo_which_prints_its_own() -> None:
    steps = {command for command, _ in STEPS}
    assert {"data list", *(f"data fetch {name}" for name in SOURCES)} <= steps
    assert set(commands()) - {command.split()[0] for command in steps} == {"demo"}


@pytest.mark.parametrize("command, well", STEPS)
def test_every_step_can_be_typed(command: str, well: bool) -> None:
    known = commands()
    typed, name = find(known, command.split())
    names = {name for _, name, _, _ in Formatter().parse(STEPS[command, well]) if name}
    given = dict.fromkeys(names, "file.safetensors") | {"inputs": ["2x3", "2x1:int64"]}
    if "task" in names:
        given["task"] = "digits-rows"
    line = next_step(
        " ".join(command.split()[: len(command.split()) - len(name)]),
        given | {"name": "".join(name)},
        well,
    )
    assert line is not None
    program, *words = shlex.split(line)
    assert program == "pathspace"
    following, words = find(known, words)
    context = following.make_context(
        following.name, words
    )  # refuses unknown options and missing arguments
    assert "inputs" not in names or list(context.params["inputs"]) == given["inputs"]
    assert names - {"inputs"} <= {parameter.name for parameter in typed.params}


def test_nothing_follows_what_went_to_standard_output_or_lacks_a_part() -> None:
    for option in ("json", "output", "proof"):
        assert next_step("verify", {"target": "net.py:Net", option: "-"}) is None
    assert next_step("balance", {"target": "folder", "source": "new", "destination": None}) is None
    assert next_step("data", {}) is None and next_step("data fetch", {"name": "nothing"}) is None
    assert (
        next_step("verify", {"target": "a b.py:Net", "proof": "p.json"})
        == "pathspace check p.json 'a b.py:Net'"
    )


def test_a_terminal_shows_the_step_and_a_pipe_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    words = ["explain", "net.py:Net", "--input", "2x3"]
    on_terminal = CliRunner().invoke(cli.app, words, env=TERMINAL)
    assert on_terminal.output.endswith(
        "Next: pathspace report net.py:Net --input 2x3 -o report.html\n"
    )
    assert on_terminal.output.count("Next: ") == 1 and on_terminal.exit_code == 0
    assert "Next: " not in CliRunner().invoke(cli.app, words).output
    for more in (["--json", "-"], ["--help"], ["--input", "2x4"]):
        assert "Next: " not in CliRunner().invoke(cli.app, [*words, *more], env=TERMINAL).output


def test_a_command_of_a_group_has_a_step() -> None:
    load_commands()
    shown = CliRunner().invoke(cli.app, ["data", "list"], env=TERMINAL).output
    assert shown.endswith("Next: pathspace data fetch fashion-mnist\n")
