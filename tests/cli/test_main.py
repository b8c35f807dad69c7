"""The command line: results, exit codes, JSON on standard output, and one
sentence for whatever is wrong.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
import torch
import typer
from command_line import importable
from typer.testing import CliRunner, Result

import pathspace as ps
from pathspace.cli import main as cli

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
    def forward(self, x):
        return self.second(self.first(x).relu())

class Chatty(Net):
    def __init__(self):
        super().__init__()
        print("building")
    def forward(self, x):
        print("running")
        return super().forward(x)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(5, 3), nn.Linear(3, 2)
    def forward(self, tokens):
        return self.out(self.table(tokens).relu())

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x

class Fragile(Net):
    def forward(self, x):
        return {}["lost"]

class Leaving(Net):
    def forward(self, x):
        raise SystemExit(7)

class Interrupted(Net):
    def forward(self, x):
        raise KeyboardInterrupt

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    def forward(self, x):
        return self.out(self.norm(self.layer(x)).relu())

def with_example():
    return Net(), torch.ones(2, 3)

def evaluated():
    return Normed().eval(), torch.randn(4, 3)

def frozen():
    return Normed().train(), torch.randn(4, 3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with ``nets.py`` in it."""
    yield from importable(tmp_path, monkeypatch, "nets", NETS)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "160"})


def refused(result: Result) -> str:
    """The sentence on standard error, after checking that there is nothing else."""
    assert result.exit_code == 2
    assert result.stdout == ""
    return one_sentence(result.stderr)


def one_sentence(text: str) -> str:
    assert text.startswith("Error: ")
    assert text.endswith(".\n")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text


def console(*words: str, folder: Path, **more: object) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a process of its own."""
    command = [str(Path(sys.executable).with_name("pathspace")), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, timeout=120, check=False, **options
    )


# What the commands do


def test_verify_json_on_standard_output_is_json_only(folder: Path) -> None:
    result = run("verify", "nets.py:Chatty", "--input", "2x3", "--json", "-")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["weights"] == 3 * 4 + 4 + 4 * 2 + 2
    assert record["units"] == 4
    assert record["dimension"] == record["basis_paths"] == 22
    assert record["rank"] in (22, None)
    assert {record[f"theorem{number}"]["holds"] for number in (1, 2, 3)} == {True}
    assert record["invariance"]["max_relative_violation"] <= record["invariance"]["tolerance"]
    assert record["pinned"] == []
    assert record["seconds"] > 0
    assert record["method"] in ("exact", "certificate")
    assert "building" in result.stderr


def test_verify_json_to_a_file_besides_the_table(folder: Path) -> None:
    (folder / "out.json").write_text("old")
    result = run("verify", "nets:Net", "--input", "2x3", "--json", "out.json")
    assert result.exit_code == 0, result.output
    assert "Theorem 3" in result.stdout and "holds" in result.stdout and result.stderr == ""
    assert json.loads((folder / "out.json").read_text())["dimension"] == 22
    assert sorted(os.listdir(folder)) == ["nets.py", "out.json"]


def record_of(*words: str) -> dict[str, object]:
    result = run("verify", *words, "--json", "-")
    assert result.exit_code == 0, result.output
    return {key: value for key, value in json.loads(result.stdout).items() if key != "seconds"}


def test_the_same_seed_gives_the_same_certificate(folder: Path) -> None:
    words = ["nets.py:Net", "--input", "2x3", "--rule", "random"]
    assert record_of(*words, "--seed", "5") == record_of(*words, "--seed", "5")
    assert record_of(*words, "--seed", "5") != record_of(*words, "--seed", "6")


@pytest.mark.parametrize(
    ("words", "training"),
    [
        (["nets.py:evaluated"], False),
        (["nets.py:evaluated", "--train"], True),
        (["nets.py:frozen"], True),
        (["nets.py:frozen", "--eval"], False),
    ],
)
def test_the_mode_is_kept_unless_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], training: bool
) -> None:
    seen = []
    real = ps.verify

    def verify(model, *args, **options):
        seen.append(model.training)
        return real(model, *args, **options)

    monkeypatch.setattr("pathspace.verify", verify)
    assert run("verify", *words).exit_code == 0
    assert seen == [training]


def test_something_failing_is_exit_code_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = ps.verify(torch.nn.Linear(2, 2), torch.ones(1, 2))
    bad = replace(good, theorem3={**good.theorem3, "holds": False, "evidence": "made up"})
    monkeypatch.setattr("pathspace.verify", lambda *_args, **_options: bad)
    result = run("verify", "nets.py:Net", "--input", "2x3", "--json", "out.json")
    assert result.exit_code == 1
    assert "fails" in result.stdout
    assert json.loads((folder / "out.json").read_text())["holds"] is False


def test_scales_are_explained(folder: Path) -> None:
    result = run("explain", "nets.py:Net", "--input", "2x3", "--json", "why.json")
    assert result.exit_code == 0, result.output
    assert "outputs of the model" in " ".join(result.stdout.split())
    record = json.loads((folder / "why.json").read_text())
    assert {"totals", "parameters", "reasons", "pinned"} <= set(record)
    assert record["reasons"][-1]["chain"][-1]["op"] == "output"
    result = run("explain", "nets.py:Net", "--input", "2x3", "--json", "-")
    assert json.loads(result.stdout) == record


@pytest.mark.parametrize("rule", ["modulo", "magnitude", "random"])
def test_masks_are_written(folder: Path, rule: str) -> None:
    result = run(
        "masks", "nets.py:Net", "--input", "2x3", "-o", "masks.safetensors", "--rule", rule
    )
    assert result.exit_code == 0, result.output
    assert "Wrote masks.safetensors" in result.stdout
    assert "first.weight" in result.stdout
    masks = ps.load_masks("masks.safetensors")
    assert sum(int(mask.sum()) for mask in masks["incoming"].values()) == 4
    assert sum(int(mask.sum()) for mask in masks["outgoing"].values()) == 4
    assert masks.header["rule"] == rule
    assert sorted(os.listdir(folder)) == ["masks.safetensors", "nets.py"]


# What is shown


def test_version() -> None:
    assert run("--version").stdout == f"pathspace {version('pathspace')}\n"


# What is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vrify"], "No such command 'vrify' (did you mean 'verify'?); see 'pathspace --help'"),
        (["verify"], "Missing argument 'TARGET'; see 'pathspace verify --help'"),
        (["masks", "nets.py:Net"], "Missing option"),
        (
            ["verify", "nets.py:Net", "--rule", "best"],
            "'best' is not one of 'modulo', 'magnitude', 'random'",
        ),
        (["verify", "nets.py:Net", "--seed", "-1"], "'--seed'"),
        (["verify", "nets.py:Net", "--seed", "one"], "'--seed'"),
        (["verify", "nets.py:Net", "--colour"], "No such option: --colour"),
        (["verify", "nets.py:Net", "more"], "unexpected extra argument"),
        (["--colour"], "No such option: --colour"),
    ],
)
def test_usage_errors(words: list[str], said: str) -> None:
    assert said in refused(CliRunner().invoke(cli.app, words, prog_name="pathspace"))


@pytest.mark.parametrize("command", [["verify"], ["masks", "-o", "out.safetensors"]])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nets.py"], "has no 'place:name'"),
        (["nets.py:Net", "--input", "2;3"], "The input '2;3' cannot be read"),
        (["nets.py:Net", "--input", "2x5"], "2x5:float32"),
        (["nets.py:Net", "--input", "2x3:int64"], "2x3:int64"),
        (["nets.py:Words", "--input", "2x6"], "2x6:float32"),
        (["nets.py:Branching", "--input", "2x3"], "torch.where"),
        (["nets.py:Fragile", "--input", "2x3"], "KeyError"),
        (["nets.py:Leaving", "--input", "2x3"], "SystemExit (7)"),
    ],
)
def test_wrong_input_is_one_sentence_and_harms_no_file(
    folder: Path, command: list[str], words: list[str], said: str
) -> None:
    (folder / "out.safetensors").write_text("old")
    assert said in refused(run(*command, *words))
    assert (folder / "out.safetensors").read_text() == "old"
    assert sorted(os.listdir(folder)) == ["nets.py", "out.safetensors"]


@pytest.mark.parametrize("command", [["verify", "--json"], ["masks", "-o"]])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing/out", "does not exist"),
        (".", "is a folder"),
        ("nets.py/out", "not a folder"),
        ("/dev/full", "device"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], path: str, said: str
) -> None:
    def never(*_arguments: object, **_options: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("pathspace.cli.target.load_target", never)
    assert said in refused(run(*command, path, "nets.py:Net", "--input", "2x3"))
    assert (folder / "nets.py").read_text() == NETS


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback_above_the_sentence(folder: Path, place: str) -> None:
    words = ["verify", "nets.py:Nut"]
    result = run(*(["--debug", *words] if place == "before" else [*words, "--debug"]))
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "There is no 'Nut'" in one_sentence(result.stderr.splitlines(keepends=True)[-1])


def test_a_defect_of_our_own_is_called_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr("pathspace.verify", fail)
    said = refused(run("verify", "nets.py:Net", "--input", "2x3"))
    assert "Internal error, ZeroDivisionError (one two)" in said and "defect of pathspace" in said
    assert "--debug" in said


@pytest.mark.parametrize(
    "library", ["python", "torch on a CPU", "torch beyond numbers", "torch on a device"]
)
def test_exhausted_memory_is_not_called_a_defect(
    folder: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        if library == "torch on a CPU":
            torch.empty(10**15)
        if library == "torch beyond numbers":
            torch.empty(2**62, 8)
        raise MemoryError if library == "python" else torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("pathspace.verify", fail)
    assert "memory is exhausted" in refused(run("verify", "nets.py:Net", "--input", "2x3"))


def test_an_interrupt_is_one_sentence(folder: Path) -> None:
    result = run("verify", "nets.py:Interrupted", "--input", "2x3")
    assert result.exit_code == 130
    assert one_sentence(result.stderr) == "Error: Interrupted before the end.\n"


# Commands of other packages


def register(app: typer.Typer) -> None:
    """An extension as another package would write it."""

    @app.command()
    def greet(name: str) -> None:
        if name == "nobody":
            raise ps.InputError("There is nobody to greet: give a name.")
        print(f"Hello, {name}")


def break_down(app: typer.Typer) -> None:
    """An extension that cannot be loaded."""
    raise RuntimeError("not today")


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two entry points of which one fails, on a copy of the list of commands."""
    points = [
        EntryPoint("good", f"{__name__}:register", cli._GROUP),
        EntryPoint("bad", f"{__name__}:break_down", cli._GROUP),
    ]
    monkeypatch.setattr(cli, "entry_points", lambda **_options: points)
    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))


def call_main(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["pathspace", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(str(end.value.code))


@pytest.mark.usefixtures("extended")
def test_extensions_add_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_main(monkeypatch, ["greet", "Ada"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello, Ada\n"
    assert shown.err.startswith("Warning: The commands of bad")
    assert "RuntimeError (not today)" in shown.err
    assert call_main(monkeypatch, ["greet", "nobody"]) == 2
    assert "Error: There is nobody to greet: give a name.\n" in capsys.readouterr().err
    assert call_main(monkeypatch, ["--version"]) == 0
    assert capsys.readouterr().err == ""


# The installed command


@pytest.mark.slow
def test_a_full_standard_output_is_one_sentence(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        done = console(
            "verify", "nets:Net", "--input", "2x3", "--json", "-", folder=folder, stdout=full
        )
    assert done.returncode == 2
    assert "Cannot write to standard output: No space left on device" in one_sentence(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_error(
    folder: Path, buffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # (an empty value is none)
    monkeypatch.setenv("PYTHONUNBUFFERED", buffered)
    reader, writer = os.pipe()
    os.close(reader)
    done = console(
        "verify", "nets:Net", "--input", "2x3", "--json", "-", folder=folder, stdout=writer
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# The guide

GUIDE = Path(__file__).parents[2] / "docs" / "command-line.md"
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)


def test_the_guide_shows_what_the_commands_print(folder: Path) -> None:
    """Every console block is executed; ``PATHSPACE_WRITE_GUIDE=1`` writes
    the output into the guide.
    """
    guide = GUIDE.read_text()
    net, checkpoints = (block.split("```")[0] for block in guide.split("```python\n")[1:3])
    (folder / "net.py").write_text(net)
    sys.path.insert(0, str(folder))
    with torch.random.fork_rng():
        exec(checkpoints)

    def executed(block: re.Match[str]) -> str:
        words = shlex.split(block["command"])[1:]
        result = CliRunner().invoke(cli.app, words, prog_name="pathspace", env={"COLUMNS": "100"})
        lines = "\n".join(line.rstrip() for line in result.output.splitlines())
        return f"```console\n$ {block['command']}\n{lines.strip(chr(10))}\n```"

    def comparable(text: str) -> list[str]:
        # rounding errors differ between machines (on some there is none), and with
        # them the width of a line
        return re.sub(r"\d\.\d+e-\d+", "0", text).split()

    fresh = BLOCK.sub(executed, guide)
    if os.environ.get("PATHSPACE_WRITE_GUIDE"):
        GUIDE.write_text(fresh)
    assert len(BLOCK.findall(guide)) == 11
    assert comparable(GUIDE.read_text()) == comparable(fresh)
    printed = CliRunner().invoke(cli.app, ["verify", "net.py:sequence", "--json", "-"]).stdout
    assert json.loads(printed)["dimension"] == 42 and "`42`" in guide
