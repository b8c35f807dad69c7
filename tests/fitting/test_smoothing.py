"""Smoothing pairs, and comparison of models modulo rescaling and order."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import pathspace as ps
from pathspace.cli import main as cli


class Layer(nn.Module):
    """The parts of a language model's layer: a norm, attention without heads, a gated part."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.norm, self.post = nn.RMSNorm(size), nn.RMSNorm(size)
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(size, 9), nn.Linear(size, 9), nn.Linear(9, size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        chances = (self.q(y) @ self.k(y).transpose(-1, -2)).softmax(-1)
        x = x + self.o(chances @ self.v(y))
        y = self.post(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def test_pairs_of_a_language_model_and_their_rescaling():
    model, x = stack().double(), torch.randn(2, 5, 6).double()
    graph = ps.trace(model, x)
    pairs = ps.smoothing_pairs(graph)
    names = {(pair.writers, pair.readers) for pair in pairs}
    for i in "01":
        for writer, readers in (
            ("norm", "qkv"),
            ("v", "o"),
            ("post", ("gate", "up")),
            ("up", ("down",)),
        ):
            assert ((f"{i}.{writer}",), tuple(f"{i}.{reader}" for reader in readers)) in names
    for pair in pairs:
        assert pair.exact
        phi = torch.zeros(graph.num_units).double()
        phi[pair.units - 1] = torch.randn(len(pair.units)).double()
        moved = ps.rescale_(copy.deepcopy(model), graph, phi)
        torch.testing.assert_close(moved(x), model(x))
        changed = {
            n
            for (n, a), b in zip(moved.named_parameters(), model.parameters(), strict=True)
            if not a.equal(b)
        }
        assert {name for side in pair.parameters for name in side} <= changed


def test_functions_that_are_no_symmetry_make_no_pair():
    model = nn.Sequential(
        nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 2)
    )
    pairs = ps.smoothing_pairs(ps.trace(model, torch.randn(2, 3)))
    assert [(pair.writers, pair.readers) for pair in pairs] == [(("2",), ("4",))]


class Tied(nn.Module):
    """Hidden units that are read by a weight, and by another one after a product of two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
        self.direct, self.after = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.direct(h) + self.after(h * self.b(x))


def test_a_product_of_the_units_is_not_left_behind():
    model, x = Tied().double(), torch.randn(4, 3).double()
    pairs = {pair.writers: pair for pair in ps.smoothing_pairs(ps.trace(model, x))}
    assert pairs["a",].readers == ("direct",) and not pairs["a",].exact


def test_a_model_without_values():
    with torch.device("meta"):
        model = Layer()
    pairs = ps.smoothing_pairs(ps.trace(model, torch.randn(2, 5, 6, device="meta")))
    assert len(pairs) == 4 and all(pair.exact for pair in pairs)


def test_recipes():
    pairs = ps.smoothing_pairs(ps.trace(stack(), torch.randn(2, 5, 6)))
    awq = json.loads(ps.smoothing_recipe(pairs, "awq"))
    assert {"prev_op": "1.up", "layers": ["1.down"], "inp": "1.down"} in awq
    assert ["0.norm", "0.q", "0.k", "0.v"] in json.loads(ps.smoothing_recipe(pairs, "aimet"))
    recipe = ps.smoothing_recipe(pairs)
    assert '- smooth_layer: "1.up"' in recipe and "AWQModifier" in recipe
    assert recipe.count("smooth_layer") == len(pairs)
    assert "SmoothQuantModifier" in ps.smoothing_recipe(pairs, "smoothquant")
    with pytest.raises(ps.InputError, match="expected one of"):
        ps.smoothing_recipe(pairs, "other")


# --- comparison


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3),
        nn.ReLU(),
        nn.Flatten(),
    )
    return layers.append(nn.Linear(5 * 4, 2)).eval()


def test_rescaled_and_reordered_is_the_same():
    model, x = net(), torch.randn(2, 3, 6, 6)
    graph, groups = ps.trace(model, x), ps.channels(model, x)
    moved = groups.permute({group.name: torch.randperm(len(group)) for group in groups})
    other = ps.rescale_(moved, graph, torch.randn(graph.num_units))
    found = ps.compare(model, other, graph)
    assert found.same and not found.differ and found.distance < 1e-6 < 0.1 < found.as_given
    assert ps.compare(model, copy.deepcopy(model), graph).as_given == 0
    with torch.no_grad():
        other[3].bias[1] += 0.5
    found = ps.compare(model, other, graph)
    assert not found.same and next(iter(found.differ)) == "3.bias"


def test_another_function_is_not():
    model, x = net(), torch.randn(2, 3, 6, 6)
    graph = ps.trace(model, x)
    assert not ps.compare(model, net(1), graph).same
    with pytest.raises(ps.InputError, match="other tensors"):
        ps.compare(model, nn.Linear(2, 2), graph)


# --- the command line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n"
        "    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
        "    return model, torch.ones(2, 4) * torch.arange(4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(*words: str):
    return CliRunner().invoke(cli.app, list(words), prog_name="pathspace")


def test_prune(folder):
    result = run(
        "prune", "small.py:net", "--keep", "0.25", "-o", "small.pt", "--json", "facts.json"
    )
    assert result.exit_code == 0, result.output
    model = torch.load("small.pt", weights_only=False)
    facts = json.loads((folder / "facts.json").read_text())
    assert model[1].out_features == 2 and model(torch.ones(1, 4)).shape == (1, 2)
    assert (
        facts["groups"]["1.weight"]["channels"] == 8
        and len(facts["groups"]["1.weight"]["kept"]) == 2
    )
    assert (
        facts["parameters_after"]
        == sum(p.numel() for p in model.parameters())
        < facts["parameters_before"]
    )
    assert run("prune", "small.py:net", "--keep", "2", "-o", "other.pt").exit_code == 2
    assert not (folder / "other.pt").exists()


def test_match_and_compare(folder):
    from small import net as small

    model, x = small()
    other = ps.channels(model, x).permute({"1.weight": torch.randperm(8)})
    save_file(model.state_dict(), "a.safetensors")
    torch.save(other.state_dict(), "b.pt")
    result = run("match", "small.py:net", "a.safetensors", "b.pt", "-o", "c.safetensors")
    assert result.exit_code == 0, result.output
    assert all(
        torch.equal(tensor, model.state_dict()[name])
        for name, tensor in load_file("c.safetensors").items()
    )
    assert run("compare", "small.py:net", "a.safetensors", "b.pt").exit_code == 0
    other[3].bias.data += 1
    torch.save(other.state_dict(), "b.pt")
    different = run("compare", "small.py:net", "a.safetensors", "b.pt", "--json", "-")
    assert different.exit_code == 1 and list(json.loads(different.output)["differ"]) == ["3.bias"]
    assert run("compare", "small.py:net", "a.safetensors", "nowhere.pt").exit_code == 2
    (folder / "broken.pt").write_text("nothing")
    assert run("compare", "small.py:net", "a.safetensors", "broken.pt").exit_code == 2


def test_smooth(folder):
    result = run("smooth", "small.py:net", "--format", "aimet")
    assert result.exit_code == 0 and json.loads(result.output) == [
        ["0", "1"],
        ["1", "3"],
    ], result.output
    assert "AWQModifier" in run("smooth", "small.py:net").output
