"""`pathspace diagnose`: table, JSON, and one sentence per mistake."""

from __future__ import annotations

import json
from pathlib import Path

import loaded_nets
import pytest
import torch
from command_line import call
from torch import nn
from torch.nn import functional as F

from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.chain.first_steps import first_steps

FILE = loaded_nets.__file__


def run(*words: str) -> tuple[int, str]:
    result = call("diagnose", *words)
    return result.exit_code, result.output


def test_table_and_json(tmp_path: Path) -> None:
    code, text = run(f"{FILE}:chain", "--json", str(tmp_path / "chain.json"))
    assert code == 0, text
    assert "Markov chain of 3 nodes" in text and "0.branch" in text and "efficiency" in text
    found = json.loads((tmp_path / "chain.json").read_text())
    assert found["length"] == 3 and found["samples"] == 8
    assert [node["name"] for node in found["nodes"]] == ["0.branch", "1.branch", "2.branch"]
    assert -1 <= found["nodes"][0]["cosine_mean"] <= 1
    signal = found["signal"]
    assert [row["layer"] for row in signal][-1] == "3"
    assert all(row["variance"] > 0 for row in signal)
    assert "Signal by depth" in text and all(row["layer"] in text for row in signal)
    code, text = run(f"{FILE}:chain", "--json", "-")
    assert code == 0 and json.loads(text) == found


def test_no_chain_is_said_politely() -> None:
    code, text = run(f"{FILE}:plain")
    assert code == 0 and "is not a Markov chain" in text
    code, text = run(f"{FILE}:plain", "--json", "-")
    assert code == 0 and json.loads(text)["length"] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [("zeros", "2 nodes with no cosine"), ("silent", "nothing can be said of their directions")],
)
def test_branches_that_start_at_zero_have_no_cosine(name: str, words: str) -> None:
    code, text = run(f"{FILE}:{name}")
    assert code == 0 and words in text and "after one small step" in text and "nan" not in text


def test_first_steps_are_the_gradient_written_out() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True).double()
    nn.init.zeros_(layer.linear2.weight), nn.init.zeros_(layer.linear2.bias)
    x, y = torch.randn(2, 4, 5, 8).double()
    chain = MarkovChain.trace(layer, x)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    found = first_steps(chain, chain.observe(F.mse_loss, x, y), F.mse_loss, [(x, y)])
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    stream = x + layer._sa_block(layer.norm1(x), None, None)
    h = torch.relu(layer.linear1(layer.norm2(stream))).detach()
    g = (stream - y).detach()
    z = -torch.einsum("btj,sui,suj->bti", h, g, h) - g.sum((0, 1))
    expected = -F.cosine_similarity(z.flatten(1), g.flatten(1), dim=1).mean()
    assert found is not None and found.steps == 1
    assert abs(found.cosines["linear2"] - float(expected)) < 0.02
    # behind a head of zeros no gradient arrives: the head moves first
    model = nn.Sequential(layer, nn.Linear(8, 8).double())
    nn.init.zeros_(model[1].weight)
    chain = MarkovChain.trace(model, x)
    found = first_steps(chain, chain.observe(F.mse_loss, x, y), F.mse_loss, [(x, y)])
    assert found is not None
    assert found.steps == 2
    assert all(value == value for value in found.cosines.values())
