"""What commands write: ``-`` everywhere, formats by suffix, weights that are not numbers,
folders and random bytes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import call, refused
from safetensors.torch import load, load_file, save_file
from torch import nn

NET = """
import torch
from torch import nn

def good():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).eval()
    return net, torch.randn(2, 2, 4, 4)

def local():
    class Local(nn.Sequential):
        pass
    net, x = good()
    return Local(*net).eval(), x

def broken():
    net, x = good()
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] = float("nan")
    return net, x
"""  # noqa: E501


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, its checkpoints, random bytes and a folder; the working directory."""
    (tmp_path / "kit.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {}
    exec(NET, space)
    for name in ("good", "broken"):
        torch.manual_seed(0)
        state = space[name]()[0].state_dict()
        save_file(state, f"{name}.safetensors")
        torch.save(state, f"{name}.pt")
    for name in ("random.safetensors", "random.pt", "random.npy"):
        Path(name).write_bytes(b"\x93\xa7" + os.urandom(500))
    Path("folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "equalise kit.py:good -o {}",
        "fit kit.py:good -o {}",
        "match kit.py:good good.safetensors good.pt -o {}",
        "balance kit.py:good good.safetensors {}",
        "rescale kit.py:good good.safetensors {}",
        "masks kit.py:good -o {}",
    ],
)
def test_a_line_stands_for_standard_output(line: str, folder: Path) -> None:
    result, other = (call(*line.format(name).split()) for name in ("-", "file.safetensors"))
    assert result.exit_code == other.exit_code == 0, result.output
    assert not Path("-").exists() and "Wrote -" in result.stderr
    tensors, same = load(result.stdout_bytes), load_file("file.safetensors")
    assert tensors.keys() == same.keys()
    assert all(torch.equal(tensors[name], same[name]) for name in same)


@pytest.mark.parametrize(("command", "start"), [("draw", b"<?xml"), ("report", b"<!DOCTYPE html>")])
def test_pictures_and_pages_go_to_standard_output(command: str, start: bytes, folder: Path) -> None:
    result = call(command, "kit.py:good", "-o", "-")
    assert result.exit_code == 0 and not Path("-").exists()
    assert result.stdout_bytes.startswith(start)


def test_a_pruned_module_goes_to_standard_output(folder: Path) -> None:
    result = call("prune", "kit.py:good", "-o", "-")
    assert result.exit_code == 0 and not Path("-").exists()
    small = torch.load(io.BytesIO(result.stdout_bytes), weights_only=False)
    assert small[0].weight.shape == (2, 2, 3, 3)


@pytest.mark.parametrize(
    "line",
    [
        "verify kit.py:good --json - --proof -",
        "equalise kit.py:good --json - -o -",
        "fit kit.py:good --json - -o -",
        "prune kit.py:good --json - -o -",
        "match kit.py:good good.pt good.pt --json - -o -",
        "balance kit.py:good good.safetensors - --json -",
        "report kit.py:good --json - -o -",
    ],
)
def test_standard_output_holds_one_result(line: str, folder: Path) -> None:
    refused(line, "two results on standard output")


@pytest.mark.parametrize(
    "line",
    [
        "masks kit.py:good -o x.pt",
        "draw kit.py:good -o x.html",
        "equalise kit.py:good -o x.pt",
        "fit kit.py:good -o x.pdf",
        "prune kit.py:good -o x.html",
        "match kit.py:good good.pt good.pt -o x.pdf",
        "report kit.py:good -o x.pdf",
    ],
)
def test_another_format_is_refused_before_any_work(line: str, folder: Path) -> None:
    refused(line, f"found the file '{line.split()[-1]}', expected a name ending in")


@pytest.mark.parametrize(
    "line",
    [
        "verify kit.py:broken",
        "masks kit.py:broken --rule magnitude -o m.safetensors",
        "equalise kit.py:broken",
        "equalise kit.py:broken --keep-norms",
        "fit kit.py:broken",
        "prune kit.py:broken -o p.pt",
        "match kit.py:good good.pt broken.pt -o m.safetensors",
        "match kit.py:good broken.pt good.pt -o m.safetensors",
        "compare kit.py:good good.pt broken.pt",
        "balance kit.py:good broken.safetensors b.safetensors",
        "rescale kit.py:good broken.safetensors r.safetensors",
    ],
)
def test_weights_that_are_no_numbers_are_refused(line: str, folder: Path) -> None:
    refused(line, "0.weight", "NaN or infinite", "before it diverged")


@pytest.mark.parametrize(
    "line",
    [
        "explain kit.py:broken",
        "smooth kit.py:broken",
        "diagnose kit.py:broken",
        "masks kit.py:broken -o m.safetensors",
        "draw kit.py:broken -o g.svg",
    ],
)
def test_what_needs_no_numbers_takes_any(line: str, folder: Path) -> None:
    assert call(*line.split()).exit_code == 0


def test_a_module_that_cannot_be_saved_is_one_sentence(folder: Path) -> None:
    refused(
        "prune kit.py:local -o small.pt",
        "prune found Local, which torch.save cannot write",
        "call ps.channels(",
    )
