"""llm-compressor rotates small models, by recipes of the library and by its own names of modules.

``python -m spinquant FILE`` needs the packages of ``llm_compressor.txt``. It writes for each model
the rotations of the recipe, how far they move the outputs, and what the tool's own names do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor, nn

import pathspace as ps

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
LATENT = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
# class -> sizes of its own
MODELS: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "BitNetForCausalLM": {},
    "DeepseekV3ForCausalLM": LATENT,
    "GemmaForCausalLM": {},
    "GlmForCausalLM": {},
    "GraniteForCausalLM": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "Lfm2ForCausalLM": {},
    "MambaForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "NanoChatForCausalLM": {},
    "Phi3ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3_5ForCausalLM": LINEAR | {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "SmolLM3ForCausalLM": {},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": {},
}
OWN = {"default_stage": {"default_modifiers": {"SpinQuantModifier": {"rotations": ["R1", "R2"]}}}}


def made(name: str) -> nn.Module:
    """A model whose numbers are all random, gains and biases too."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES | MODELS[name])).eval()
    for path, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.uniform_(0.5, 1.5).sub_(0 if path.endswith("weight") else 1)
    return model


def applied(folder: Path, kind: Any, recipe: str, words: Tensor) -> tuple[float, nn.Module]:
    """The change of the outputs, relative to the largest one, and the rotated model."""
    from llmcompressor import oneshot

    model = kind.from_pretrained(folder).eval()
    before = model(words).logits
    rotated = oneshot(model=model, recipe=recipe)
    return float((rotated(words).logits - before).abs().max() / before.abs().max()), rotated


def of(name: str, folder: Path) -> dict[str, Any]:
    """What recipes do to one model."""
    model, words = made(name), torch.randint(3, 64, (2, 7))
    kind = type(model)
    model.save_pretrained(folder)
    recipe = ps.rotation_recipe(model, ps.spaces(model, kwargs={"input_ids": words}))
    change, rotated = applied(folder, kind, recipe, words)
    modifier = yaml.safe_load(recipe)["default_stage"]["default_modifiers"]["SpinQuantModifier"]
    groups = modifier["transform_config"]["config_groups"]
    targets = {
        path for group in groups.values() for one in group["apply"] for path in one["targets"]
    }
    still = [
        path
        for path in targets
        if torch.equal(rotated.get_submodule(path).weight, model.get_submodule(path).weight)
    ]
    # its own names of modules, where subtracting the means of the embedding changes nothing
    table = model.get_input_embeddings().weight
    table -= table.mean(-1, keepdim=True)
    model.save_pretrained(folder)
    try:
        own = (
            "same" if applied(folder, kind, yaml.dump(OWN), words)[0] < 1e-5 else "another function"
        )
    except (ValueError, NotImplementedError):
        own = "stops"
    return {"rotations": sorted(groups), "change": change, "still": still, "own": own}


@torch.no_grad()
def main(file: str) -> None:
    results = {}
    for name in MODELS:
        with TemporaryDirectory() as folder:
            results[name] = of(name, Path(folder))
    Path(file).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
