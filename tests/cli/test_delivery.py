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

import pathspace as ps

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
    assert tensors.keys() == same.keys() and all(
        torch.equal(tensors[name], same[name]) for name in same
    )


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
    "line", ["explain kit.py:broken", "smooth kit.py:broken", "diagnose kit.py:broken"]
)
def test_what_needs_no_numbers_marks_them(line: str, folder: Path) -> None:
    result = call(*line.split())
    assert (
        result.exit_code == 0 and "0.weight" in result.stderr and "NaN or infinite" in result.stderr
    )


@pytest.mark.parametrize(
    "line",
    [
        "match kit.py:good {}.pt good.pt -o m.safetensors",
        "compare kit.py:good good.pt {}.safetensors",
        "balance kit.py:good {}.safetensors b.safetensors",
        "equalise kit.py:good --calibration {}.npy",
        "rescale kit.py:good good.safetensors r.safetensors --phi {}.npy",
        "diagnose kit.py:good --checkpoint {}.pt",
    ],
)
def test_random_bytes_and_folders_are_bad_input(line: str, folder: Path) -> None:
    refused(line.format("random"), "random.")
    word = next(word for word in line.split() if word.startswith("{}"))
    if "balance" not in line:  # checkpoints may be folders
        refused(line.replace(word, "folder"), "the folder 'folder', expected a file")


def test_log_scales_that_are_no_numbers_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    graph, before = ps.trace(model, torch.randn(1, 2)), [p.clone() for p in model.parameters()]
    wrong = [torch.tensor([0.0, torch.nan, 0.0]), torch.zeros(2), [0.0, 0.0, 0.0], None]
    for phi in wrong:
        with pytest.raises(ps.PathspaceError, match="phi"):
            ps.rescale_(model, graph, phi)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_module_that_cannot_be_saved_is_one_sentence(folder: Path) -> None:
    refused(
        "prune kit.py:local -o small.pt",
        "prune found Local, which torch.save cannot write",
        "call ps.channels(",
    )
