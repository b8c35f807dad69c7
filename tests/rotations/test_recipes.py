"""Rotations as recipes of llm-compressor: what they say, what is left out, and the tool itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import call, refused
from torch import Tensor, nn

import pathspace as ps
from pathspace.errors import InputError

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "build/llm-compressor"
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def read(recipe: str) -> tuple[dict[str, Any], list[str]]:
    """The settings of the modifier, and the comments."""
    modifier = yaml.safe_load(recipe)["default_stage"]["default_modifiers"]["SpinQuantModifier"]
    return modifier, [line for line in recipe.splitlines() if line.startswith("# left out")]


def of(model: nn.Module, x: Tensor = X) -> tuple[dict[str, Any], list[str]]:
    return read(ps.rotation_recipe(model, ps.spaces(model, x)))


def test_a_stream_with_a_norm() -> None:
    recipe, comments = of(nn.Sequential(nn.Linear(3, 8), nn.RMSNorm(8), nn.Linear(8, 2)))
    assert recipe["norm_mappings"] == [{"norm": "1", "linears": ["2"]}]
    (name, group), *others = recipe["transform_config"]["config_groups"].items()
    assert (name, group["head_dim"], others, comments) == ("R1", 8, [], [])
    assert group["apply"] == [
        {"targets": ["0"], "location": "weight_output", "inverse": False},
        {"targets": ["2"], "location": "weight_input", "inverse": True},
    ]


@pytest.mark.parametrize(("size", "block"), [(4, 4), (12, 12), (14, 2), (72, 72), (4 * 67, 4)])
def test_the_largest_hadamard_matrix(size: int, block: int) -> None:
    recipe, _ = of(nn.Sequential(nn.Linear(3, size), nn.Linear(size, 2)))
    assert recipe["transform_config"]["config_groups"]["R2"]["head_dim"] == block


class Gained(nn.Module):
    """A norm that multiplies by its weight, or by a number more."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift, self.weight = shift, nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.shift + self.weight if self.shift else self.weight
        return nn.functional.rms_norm(x, (8,)) * gain


class GemmaRMSNorm(Gained):
    """A name that the tool knows."""


class Named(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Sliced(nn.Module):
    """A weight of which one space has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.other = nn.Linear(3, 12), nn.Linear(8, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.leave(h[:, :8]) + torch.relu(self.other(torch.relu(h[:, 8:])))


class Shared(nn.Module):
    """Two layers with one weight, each between others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 8, bias=False), nn.Linear(3, 8, bias=False)
        self.two.weight = self.one.weight
        self.leave, self.other = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.one(x)) + self.other(self.two(torch.relu(x)))


def chain(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), norm, nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (chain(nn.LayerNorm(8)), "vector of ones"),
        (nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 2)), "no Hadamard matrix for 9 features"),
        (chain(Gained(1.0)), "does not know that 1.weight stands for 1 + 1.weight"),
        (chain(GemmaRMSNorm(0.0)), "does not know that 1.weight stands for 0 + 1.weight"),
        (Named(Linear=nn.Linear(3, 8), last=nn.Linear(8, 2)), "Linear.weight is not the weight"),
        (Sliced(), "it is a part of enter.weight"),
        (Shared(), "one.weight has other uses"),
    ],
)
def test_what_the_tool_cannot_do_is_left_out(model: nn.Module, why: str) -> None:
    recipe, comments = of(model)
    assert why in "\n".join(comments)
    assert recipe["transform_config"] == {"config_groups": {}} and not recipe["norm_mappings"]


@pytest.mark.parametrize("norm", [Gained(0.0), GemmaRMSNorm(1.0)])
def test_gains_that_the_tool_knows(norm: nn.Module) -> None:
    assert of(chain(norm))[0]["norm_mappings"] == [{"norm": "1", "linears": ["2"]}]


class Tied(nn.Module):
    """A model whose code asks for its tie, or not."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(7, 8), nn.RMSNorm(8), nn.Linear(8, 7, False)
        self.head.weight, self.asks = self.table.weight, asks
        self.config = SimpleNamespace(tie_word_embeddings=True)

    def forward(self, words: Tensor) -> Tensor:
        factor = 0.3 if self.asks and self.config.tie_word_embeddings else 1.0
        return self.head(factor * self.norm(self.table(words)))

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_a_tie_that_the_tool_cuts() -> None:
    recipe, comments = of(Tied(asks=False), torch.arange(7))
    assert recipe["norm_mappings"] == [{"norm": "norm", "linears": ["head"]}] and not comments
    with pytest.raises(InputError, match=r"table\.weight and head\.weight are not tied"):
        of(Tied(asks=True), torch.arange(7))


def test_an_unknown_tool_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(InputError, match="found form='quarot', expected one of 'llm-compressor'"):
        ps.rotation_recipe(model, ps.spaces(model, X), "quarot")


def test_a_configuration_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} | sizes | heads)
    )
    result = call("rotate", f"transformers:{file}", "--format", "llm-compressor")
    assert result.exit_code == 0, result.output
    groups = read(result.stdout)[0]["transform_config"]["config_groups"]
    assert {name: group["head_dim"] for name, group in groups.items()} == {"R1": 32, "R2": 8}
    monkeypatch.chdir(tmp_path)
    refused(f"rotate transformers:{file}", "no SOURCE with no --format")
    refused("rotate old new --format llm-compressor", "a SOURCE with a --format")


@pytest.mark.slow
def test_the_tool_rotates_architectures_that_it_does_not_know(tmp_path: Path) -> None:
    if not (TOOL / ".ready").exists():
        pytest.skip("needs llm-compressor: 'make slow' installs it in build/llm-compressor")
    run = subprocess.run(
        [sys.executable, "-m", "spinquant", tmp_path / "found.json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TOOL), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: one["change"] for name, one in found.items() if one["change"] > 1e-5} == {}
    assert {name: one["still"] for name, one in found.items() if one["still"]} == {}
    page = (ROOT / "docs/rotations.md").read_text(encoding="utf-8")
    rows = [
        f"| `{name}` | {', '.join(one['rotations'])} | {one['own']} |"
        for name, one in found.items()
    ]
    assert len(rows) == 17 and [row for row in rows if row not in page] == []
