"""Smaller models that are saved, and models that masks have pruned before."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import pathspace as ps


def test_a_pruned_language_model_is_saved_and_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=24, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=6, num_key_value_heads=2, head_dim=4, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = {"input_ids": torch.arange(10).view(2, 5)}
    half = ps.channels(model, kwargs=ids).remove(keep=0.5)
    half.save_pretrained(tmp_path)  # type: ignore[operator]
    with torch.no_grad():
        again = type(model).from_pretrained(tmp_path).eval()
        assert torch.allclose(again(**ids).logits, half(**ids).logits, atol=1e-6)


def test_masks_of_torch_prune_have_to_be_removed_first() -> None:
    model = nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 4, 3)).eval()
    prune.ln_structured(model[0], "weight", 0.5, n=2, dim=0)
    with pytest.raises(ps.UnsupportedError, match=r"call prune.remove\(module, 'weight'\) first"):
        ps.channels(model, torch.randn(2, 3, 8, 8)).remove(keep=0.5)
