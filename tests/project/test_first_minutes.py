"""What a newcomer meets first: numbers, names, refusals, and the size of what is printed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps


def convolutions() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)
    ).eval(), torch.randn(2, 1, 8, 8)


def command(*words: object) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "pathspace", *map(str, words)]
    return subprocess.run(run, capture_output=True, text=True, check=False)


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.n = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.b(torch.relu(self.n(self.a(x))))
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:Net"


RESULTS: dict[str, Any] = {
    "graph": lambda graph, model, x: graph,
    "skeleton": lambda graph, model, x: graph.skeleton(),
    "basis": lambda graph, model, x: graph.skeleton().basis(),
    "fitted": lambda graph, model, x: ps.fit_dtype(model, x),
}


@pytest.mark.parametrize("what", RESULTS)
def test_a_result_fits_the_terminal(what: str) -> None:
    model, x = convolutions()
    shown = repr(RESULTS[what](ps.trace(model, x), model, x))
    assert len(shown) < 1500 and len(shown.splitlines()) < 25


def test_inputs_in_a_tuple_are_named_as_the_mistake() -> None:
    model, x = convolutions()
    with pytest.raises(ps.PathspaceError) as caught:
        ps.trace(model, (x,))
    assert "tuple" in str(caught.value) and "invalid combination" not in str(caught.value)


def test_a_shape_in_place_of_an_input_is_named_as_the_mistake() -> None:
    model, _ = convolutions()
    with pytest.raises(ps.PathspaceError) as caught:
        ps.trace(model, (2, 1, 8, 8))
    assert "torch.randn" in str(caught.value)


@pytest.mark.parametrize("function", [ps.draw, ps.proof, ps.symbolic])
def test_a_graph_in_place_of_a_skeleton_names_the_missing_call(function: Any) -> None:
    model, x = convolutions()
    with pytest.raises(ps.PathspaceError) as caught:
        function(ps.trace(model, x))
    assert "skeleton()" in str(caught.value) and "order of the arguments" not in str(caught.value)


def test_a_share_above_one_names_the_option(tmp_path: Path, net: str) -> None:
    run = command("prune", net, "--input", "2x3", "--keep", "50", "-o", tmp_path / "out.pt")
    assert run.returncode == 2 and "--keep" in run.stderr and "a.weight" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["2,3", "2X3"])
def test_a_shape_may_be_written_with_commas(net: str, shape: str) -> None:
    assert command("verify", net, "--input", shape).returncode == 0


@pytest.mark.slow
def test_the_command_for_a_class_says_which_mode_it_certifies(net: str) -> None:
    run = command("verify", net, "--input", "8x3")
    assert "training mode" in run.stdout + run.stderr
