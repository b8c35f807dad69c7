"""Large models without weights, at full size: units and dimension, seconds and memory,
and the checker's verdict.

``PYTHONPATH=tests python -m benchmarks.large_models`` measures every model in a process of its own
(about ten minutes on one core) and writes ``docs/data/large_models.json`` and the tables on its
page; names after it measure only these, and ``page`` measures none. The units and the dimension of
the full model are compared with those of two small depths, continued by a line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import pathspace as ps
from benchmarks.figures import keep, load, page_of, write
from benchmarks.measure import alone, peak
from pathspace.errors import first_line

TOKENS = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
# (every expert at every token has scales of its own until all is solved)
FEW = {"input_ids": torch.zeros(2, 2, dtype=torch.long)}


def _text(
    kind: str, tokens: dict[str, torch.Tensor] = TOKENS, **sizes: Any
) -> Callable[[int], Any]:
    config = getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")
    return lambda layers: (model(config(**sizes, num_hidden_layers=layers)), tokens)


def _t5(layers: int) -> Any:
    config = transformers.T5Config(
        d_model=4096, d_kv=64, d_ff=10240, num_heads=64, num_layers=layers,
        num_decoder_layers=layers, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {
        **TOKENS,
        "decoder_input_ids": TOKENS["input_ids"],
    }


def _vit(layers: int) -> Any:
    config = transformers.ViTConfig(
        hidden_size=1664, intermediate_size=8192, num_attention_heads=16, num_hidden_layers=layers,
        patch_size=14, num_labels=1000,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.zeros(2, 3, 224, 224)
    }


def _unet(layers: int) -> Any:
    # (not among the test packages: ``pip install diffusers``)
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, layers_per_block=layers)
    inputs = {"sample": torch.zeros(1, 4, 32, 32), "timestep": torch.tensor(1)}
    return model, {**inputs, "encoder_hidden_states": torch.zeros(1, 7, 768)}


# name -> (how to build it with so many layers, layers, two small depths that continue as a line)
MODELS: dict[str, tuple[Callable[[int], Any], int, tuple[int, int]]] = {
    "Llama-3-8B": (
        _text("Llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
              num_attention_heads=32, num_key_value_heads=8), 32, (2, 3),
    ),
    "Llama-3-70B": (
        _text("Llama", vocab_size=128256, hidden_size=8192, intermediate_size=28672,
              num_attention_heads=64, num_key_value_heads=8), 80, (2, 3),
    ),
    "Mixtral-8x7B": (_text("Mixtral", tokens=FEW), 32, (2, 3)),
    # (of full width; all 61 layers would have 33 million units)
    "DeepSeek-V3, its first 12 layers": (_text("DeepseekV3", tokens=FEW), 12, (4, 5)),
    "Gemma-2-9B": (
        _text("Gemma2", hidden_size=3584, intermediate_size=14336, num_attention_heads=16,
              num_key_value_heads=8, head_dim=256), 42, (2, 4),
    ),
    "GPT-NeoX-20B": (_text("GPTNeoX"), 44, (2, 3)),
    "T5-XXL": (_t5, 24, (2, 3)),
    "ViT-G/14": (_vit, 48, (2, 3)),
    "U-Net of Stable Diffusion 1": (_unet, 2, (3, 4)),
}  # fmt: skip


def _graph(name: str, layers: int) -> ps.ReductionGraph:
    with ps.without_weights():
        model, inputs = MODELS[name][0](layers)
    return ps.trace(model.eval(), kwargs=inputs)


def measure(name: str) -> dict[str, Any]:
    """One model in this process."""
    torch.set_num_threads(1)
    _, layers, (low, high) = MODELS[name]
    clock, start = time.perf_counter(), time.process_time()
    graph = _graph(name, layers)
    seconds, waited = time.process_time() - start, time.perf_counter() - clock
    traced = peak()
    found = {"weights": graph.num_weights, "units": graph.num_units, "dimension": graph.dimension}
    start = time.process_time()
    verdict = ps.check(ps.proof(graph.skeleton(), name))
    proven = time.process_time() - start
    memory = peak()
    small = [_graph(name, depth) for depth in (low, high)]
    keys = ("num_units", "dimension")
    slope = [(getattr(small[1], key) - getattr(small[0], key)) / (high - low) for key in keys]
    line = [
        getattr(small[0], key) + per * (layers - low) for key, per in zip(keys, slope, strict=True)
    ]
    return {
        "layers": layers, **found, "seconds": round(seconds, 1), "clock": round(waited, 1),
        "memory_gb": round(traced / 1e9, 2),
        "proof_seconds": round(proven, 1), "proof_memory_gb": round(memory / 1e9, 2),
        "accepted": bool(verdict.accepted and verdict.dimension == graph.dimension),
        "as_extrapolated": line == [found["units"], found["dimension"]],
        "small_depths": [low, high],
    }  # fmt: skip


def tables(figures: dict[str, Any]) -> str:
    """The tables of the page: what was found, and what it cost."""
    return page_of("large-models", figures=figures).rstrip()


def main(names: list[str]) -> None:
    """Measure models one after the other, each in a process of its own."""
    figures = load("large_models")
    for name in [name for name in names if name != "page"] if names else list(MODELS):
        try:
            figures[name] = alone(measure, name)
        except Exception as error:
            print(name, first_line(error), file=sys.stderr)
            continue
        keep("large_models", figures)
        print(name, figures[name], flush=True)
    write("large-models.md", "large models", tables(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
