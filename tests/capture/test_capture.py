"""Capture leaves the model alone, and says clearly why it fails."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps
from pathspace.capture.capture import capture


def layered() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(4 * 16, 2),
    )


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_untouched(training: bool) -> None:
    model = layered().train(training)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    calls: list[int] = []
    handle = model[2].register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(model.state_dict())
    identities = {name: id(p) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    (
        capture(model, (torch.randn(2, 3, 6, 6),))
        if training
        else ps.trace(model, torch.zeros(2, 3, 6, 6))
    )
    if not training:
        assert torch.equal(torch.get_rng_state(), state)
    assert model.training == training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: id(p) for name, p in model.named_parameters()} == identities
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    calls.clear()
    model(torch.randn(2, 3, 6, 6))
    assert calls == [1]
    handle.remove()


def test_recurrent_layers_keep_their_weights() -> None:
    rnn = nn.RNN(2, 3, nonlinearity="relu")
    ps.trace(rnn, torch.randn(4, 1, 2))
    assert all(a is b for a, b in zip(rnn._flat_weights, rnn.parameters(), strict=True))
    assert rnn(torch.randn(4, 1, 2))[0].shape == (4, 1, 3)


def branching(net: Any, x: Tensor) -> Tensor:
    y = net.layer(x)
    if y.sum() > 0:
        return y
    return -y


def scaled(net: Any, x: Tensor, *, scale: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    hidden = torch.relu(net.first(x)) * scale
    return {"both": (net.second(hidden), net.second(2 * hidden))}


def test_keyword_inputs_and_nested_outputs() -> None:
    model = network(scaled, first=nn.Linear(3, 4), second=nn.Linear(4, 2))
    graph = ps.trace(model, torch.randn(2, 3), kwargs={"scale": torch.ones(1)})
    assert (graph.num_weights, graph.num_units) == (26, 4)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (nn.Linear(3, 3), (torch.randn(2, 4),), "2x4:float32"),
        (nn.Linear(3, 3), (torch.ones(2, 3, dtype=torch.long),), "int64"),
        (nn.Linear(3, 3).double(), (torch.randn(2, 3),), "dtype"),
        (
            network(branching, layer=nn.Linear(3, 3)),
            (torch.randn(2, 3),),
            "capture/test_capture.py:",
        ),
        (
            network(lambda net, x: torch.cov(x)),
            (torch.randn(2, 3),),
            "depends on the values of tensors",
        ),
        (nn.LazyLinear(3), (torch.randn(2, 3),), "run the model once"),
        (nn.DataParallel(nn.Linear(3, 3)), (torch.randn(2, 3),), "that it was made of"),
    ],
)
def test_failures_are_one_sentence(
    model: nn.Module, inputs: tuple[Tensor, ...], words: str
) -> None:
    with pytest.raises(ps.PathspaceError) as caught:
        ps.trace(model, *inputs)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_modules_are_traced() -> None:
    with pytest.raises(ps.InputTypeError, match="function"):
        ps.trace(lambda x: x, torch.randn(1))  # type: ignore[arg-type]


SWITCH = """
import torch

class Switch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)

    def forward(self, x):
        h = self.a(x)
        return self.b(torch.relu(h) if x.shape[0] <= 4 else torch.tanh(h))
"""


@pytest.mark.parametrize("folder", ["torch", "pathspace", "sympy", "site-packages"])
def test_the_name_of_a_folder_changes_no_answer(tmp_path: Path, folder: str) -> None:
    found = []
    for place in ("plain", folder):
        path = tmp_path / place / "net" / "net.py"
        path.parent.mkdir(parents=True)
        path.write_text(SWITCH)
        spec = importlib.util.spec_from_file_location(f"{place}_net", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        graph = ps.trace(module.Switch(), torch.randn(2, 4))
        found.append((graph.num_units, graph.range))
        with pytest.raises(ps.CaptureError, match=rf"{path}:10"):
            ps.trace(module.Switch(), torch.randn(2, 5))
    assert found[0] == found[1] and "the same operations" in found[0][1]
