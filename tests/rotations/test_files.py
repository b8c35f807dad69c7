"""Changes of basis of checkpoints: the same numbers as in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import pathspace as ps
from pathspace.errors import InputError

transformers = pytest.importorskip("transformers")


def language_model(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("files", ["1GB", "20KB"])
def test_a_folder_of_transformers(tmp_path: Path, tied: bool, files: str) -> None:
    model, words = language_model(tied), torch.arange(9)[None]
    model.save_pretrained(tmp_path / "old", max_shard_size=files)
    found = ps.spaces(model, kwargs={"input_ids": words})
    ps.rotate_files(found, "random", tmp_path / "old", tmp_path / "new", seed=3)
    before = model(words).logits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(loaded(words).logits, before, atol=2e-5, rtol=1e-4)
    assert loaded.config.tie_word_embeddings is False
    ps.rotate_(model, found, "random", seed=3)
    for name, own in model.state_dict().items():
        assert torch.equal(own, loaded.state_dict()[name]), name
    index = tmp_path / "new" / "model.safetensors.index.json"
    assert index.exists() is (files == "20KB")
    if tied and index.exists():
        assert "lm_head.weight" in json.loads(index.read_text())["weight_map"]


def test_spaces_of_a_model_without_values(tmp_path: Path) -> None:
    model, words = language_model(False), torch.arange(9)[None]
    model.save_pretrained(tmp_path / "old")
    with ps.without_weights():
        empty = transformers.LlamaForCausalLM(model.config).eval()
    found = ps.spaces(empty, kwargs={"input_ids": words})
    ps.rotate_files(found, "hadamard", tmp_path / "old", tmp_path / "new")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(loaded(words).logits, model(words).logits, atol=2e-5, rtol=1e-4)


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    found = ps.spaces(model, torch.ones(3))
    save_file({"0.weight": torch.ones(8, 3)}, tmp_path / "part.safetensors")
    with pytest.raises(InputError, match=r"no tensor '0.bias'"):
        ps.rotate_files(found, "random", tmp_path / "part.safetensors", tmp_path / "x.safetensors")
    other = {name: torch.ones(5) for name in model.state_dict()}
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="expected 8 numbers"):
        ps.rotate_files(found, "random", tmp_path / "other.safetensors", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)).to(torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    a = torch.randn(8, 8, dtype=torch.float64)
    found = ps.spaces(model, torch.ones(3, dtype=torch.bfloat16))
    ps.rotate_files(found, {"0.weight": a}, tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    new = load_file(tmp_path / "b.safetensors")
    expected = (a @ model[0].weight.double()).to(torch.bfloat16)
    assert torch.equal(new["0.weight"], expected)
