"""The change of basis between two models is found again."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from rotations.test_spaces import BETWEEN, Llama, two
from torch import nn
from zoo.entry import load

import pathspace as ps
from pathspace.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["nothing", "other factors", "a length", "a layer norm", "a turn"])
def test_between_two_maps(name: str) -> None:
    model, x = two(BETWEEN[name][0], 6).double(), torch.randn(4, 3, dtype=torch.float64)
    model.a, model.b = nn.Linear(3, 6).double(), nn.Linear(6, 2).double()
    found = ps.spaces(model, x)
    other = ps.rotate_(deepcopy(model), found, "random")
    aligned = ps.find_rotation(model, other, found)
    assert aligned.equal
    assert torch.allclose(ps.rotate_(model, found, aligned.elements)(x), other(x))


def test_a_language_model_and_one_with_another_function() -> None:
    model, words = Llama().double(), torch.randint(11, (3, 6))
    found = ps.spaces(model, words)
    other = ps.rotate_(deepcopy(model), found, "random", seed=7)
    aligned = ps.find_rotation(model, other, found)
    assert aligned.equal
    assert aligned.distance < 1e-9
    with torch.no_grad():
        other.up.weight[0, 0] += 0.1
    changed = ps.find_rotation(model, other, found)
    assert not changed.equal
    assert changed.worst == "up.weight"


@pytest.mark.parametrize("name", ["hf_llama_eager_tied", "hf_gpt2", "hf_gpt_neox", "hf_qwen3"])
def test_language_models_of_a_library(name: str) -> None:
    model, args, kwargs = load()[name].make("eval", small=True)
    model = model.double()
    found = ps.spaces(model, *args, kwargs=kwargs)
    other = ps.rotate_(deepcopy(model), found, "random", seed=3)
    assert ps.find_rotation(model, other, found).equal
    stranger = load()[name].make("eval", small=True)[0].double()
    with torch.no_grad():
        for parameter in stranger.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert not ps.find_rotation(model, stranger, found).equal


def test_another_architecture_is_refused() -> None:
    model, x = two(lambda x: x), torch.randn(4, 3)
    with pytest.raises(InputError, match=r"'a.weight' of shape \(6, 3\) and \(5, 3\)"):
        ps.find_rotation(model, two(lambda x: x, 5), ps.spaces(model, x))
