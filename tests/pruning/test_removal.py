"""Smaller models outside of the mode and the inputs of the trace, and channels of no group."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import pathspace as ps


def smaller(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[Any, str]:
    """Channels of a model, a half of it, and everything that was said (warnings, refusals)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = ps.channels(model, *inputs, **options)
        try:
            half = groups.remove(keep=0.5)
        except ps.PathspaceError as error:
            return None, str(error)
    return half, " ".join([str(w.message) for w in caught] + list(groups.refused.values()))


def llama(**settings: Any) -> tuple[Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, use_cache=False, **settings)
    return transformers.LlamaForCausalLM(config).eval(), {"input_ids": torch.arange(10).view(2, 5)}


def test_a_pruned_language_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model, ids = llama(num_attention_heads=6, num_key_value_heads=2, head_dim=4)
    half = ps.channels(model, kwargs=ids).remove(keep=0.5)
    half.save_pretrained(tmp_path)  # type: ignore[operator]
    with torch.no_grad():
        again = type(model).from_pretrained(tmp_path).eval()
        assert torch.allclose(again(**ids).logits, half(**ids).logits, atol=1e-6)


def test_masks_of_torch_prune_can_be_made_small() -> None:
    model = nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 4, 3)).eval()
    prune.ln_structured(model[0], "weight", 0.5, n=2, dim=0)
    half, said = smaller(model, torch.randn(2, 3, 8, 8))
    assert (half is not None and half[2].weight.shape[1] == 10) or "prune.remove" in said
