"""Every command with what is no model, no file, or no number: exit code 2, one
sentence, and no file is touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import load_commands, refused
from safetensors.torch import save_file
from torch import nn
from typer.core import TyperGroup
from typer.main import get_command

import pathspace as ps
from pathspace.cli import main as cli

NET = """
import torch
from torch import nn

def good():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(4, 3)"""

# one line that works for each command; {} stands around what is read, <> around what is written
LINES = {
    "verify": "{kit.py:good} --json <c.json> --proof <p.json>",
    "check": "{proof.json} {kit.py:good}",
    "explain": "{kit.py:good} --json <e.json>",
    "draw": "{kit.py:good} -o <g.svg>",
    "masks": "{kit.py:good} -o <m.safetensors>",
    "spaces": "{kit.py:good}",
    "rotate": "{kit.py:good} {good.safetensors} <r.safetensors> --by random",
    "rescale": "{kit.py:good} {good.safetensors} <r.safetensors> --phi {phi.npy}",
    "balance": "{kit.py:good} {good.safetensors} <b.safetensors> --json <b.json>",
    "equalise": "{kit.py:good} --calibration {x.npy} -o <q.safetensors> --json <q.json>",
    "fit": "{kit.py:good} --calibration {x.npy} -o <f.safetensors> --json <f.json>",
    "prune": "{kit.py:good} -o <s.pt> --json <s.json>",
    "match": "{kit.py:good} {good.safetensors} {good.pt} -o <o.safetensors> --json <o.json>",
    "compare": "{kit.py:good} {good.safetensors} {good.pt} --json <d.json>",
    "smooth": "{kit.py:good}",
    "diagnose": "{kit.py:good} --checkpoint {good.pt} --json <x.json>",
    "report": "{kit.py:good} --checkpoint {good.pt} -o <page.html> --json <page.json>",
    "train": "digits-rows --out <run> --json <t.json>",
    "reproduce": "toy --out <again>",
    "demo": "--out <demo>",
    "data list": "",
    "data fetch": "bible --out <bible>",
}


def commands(group: TyperGroup, above: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        yield from (
            commands(command, f"{above}{name} ")
            if isinstance(command, TyperGroup)
            else [above + name]
        )


def test_the_table_has_every_command() -> None:
    load_commands()
    assert set(commands(get_command(cli.app))) == set(LINES)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("kit.py").write_text(NET)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(4, 3)
    save_file(model.state_dict(), "good.safetensors")
    torch.save(model.state_dict(), "good.pt")
    Path("proof.json").write_text(json.dumps(ps.proof(ps.trace(model, x).skeleton())))
    for suffix in ("safetensors", "pt", "npy", "json", "py"):
        Path(f"noise.{suffix}").write_bytes(b"\x93\xa7" + os.urandom(300))
    Path("folder").mkdir()
    Path("file").touch()
    return tmp_path


def wrong() -> Iterator[str]:
    for command, line in LINES.items():
        words = line.split()
        plain = [word.strip("{}<>") for word in words]
        for place, word in enumerate(words):
            if word.startswith("{"):
                suffix = plain[place].partition(":")[0].rsplit(".")[-1]
                others = [f"noise.{suffix}", f"absent.{suffix}", "folder"]
                if suffix == "py":
                    others = [f"{other}:Net" for other in others[:2]]
                elif command in ("rotate", "rescale", "balance") and suffix == "safetensors":
                    # (checkpoints may be folders)
                    others.pop()
                for other in others:
                    yield " ".join([command, *plain[:place], other, *plain[place + 1 :]])
            elif word.startswith("<"):
                other = "file/below" if "." in word else "file"
                yield " ".join([command, *plain[:place], other, *plain[place + 1 :]])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("line", list(wrong()))
def test_what_is_wrong_is_refused_in_one_sentence(line: str, folder: Path) -> None:
    refused(line)
