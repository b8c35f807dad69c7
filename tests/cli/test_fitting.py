"""The commands that rescale models for rounding and for small types."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import call
from safetensors.torch import load_file, save_file

NET = """
import torch
from torch import nn
def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)).eval()
    with torch.no_grad():
        model[1].weight.mul_(torch.logspace(-4, 5, 6)), model[4].weight.reshape(4, 6, 16).div_(
            torch.logspace(-4, 5, 6)[:, None])
    return model
"""  # noqa: E501


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    np.save(
        tmp_path / "x.npy",
        torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(1)).numpy(),
    )
    return f"{tmp_path / 'net.py'}:net"


def test_equalise_writes_the_rescaled_weights(target: str, tmp_path: Path) -> None:
    output, report = tmp_path / "out.safetensors", tmp_path / "out.json"
    given, wanted = ("--input", "2x3x6x6", "--bits", "6"), ("-o", output, "--json", report)
    found = call("equalise", target, *given, *wanted, "--calibration", tmp_path / "x.npy")
    assert found.exit_code == 0, found.output
    result = json.loads(report.read_text())
    assert result["helped"] and result["after"] > result["before"] + 3 and result["units"] == 6
    assert result["changed"] == ["batch norms folded"] and "6 bits per tensor" in found.output
    assert {"0.weight", "0.bias", "4.weight", "4.bias"} == set(load_file(output))


def test_fit_prints_a_table_and_its_verdict(target: str, tmp_path: Path) -> None:
    found = call("fit", target, "--input", "8x3x6x6", "--json", "-")
    result = json.loads(found.output)
    assert found.exit_code == (0 if result["fits"] else 1)
    assert not result["fitted_before"]
    assert result["fits"]
    assert {row["kind"] for row in result["table"]} == {"activations", "weights", "fixed scales"}


def test_tensors_with_the_names_of_inputs_are_passed_by_name(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Two(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)\n"
        "    def forward(self, x, gate):\n"
        "        return self.down(self.up(x).relu()) * (1e-3 * gate).exp()[:, :3]\n"
    )
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    save_file({"x": x, "gate": torch.full((12, 3), 7e5)}, tmp_path / "x.safetensors")
    words = ("fit", f"{tmp_path / 'two.py'}:Two", "--input", "12x4", "--input", "12x4")
    found = call(*words, "--calibration", tmp_path / "x.safetensors", "--json", "-")
    # (in the order of the names, x would be the gate, and the first layer would refuse the gate)
    assert found.exit_code in (0, 1) and json.loads(found.output)["table"], found.output
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    found = call(*words, "--calibration", tmp_path / "words.npy")
    assert "words.npy' cannot be read" in f"{found.exception}{found.output}"
