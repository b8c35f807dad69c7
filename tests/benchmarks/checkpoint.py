"""Balancing a sharded checkpoint of 8 GB on disk: seconds, peak memory, and the
outputs before and after.

``PYTHONPATH=tests python -m benchmarks.checkpoint FOLDER`` writes a Llama of 2 billion weights in
single precision to ``FOLDER`` (17 GB are needed there for a while), balances it in a process of its
own, and keeps what it measured in ``docs/data/checkpoint.json``.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import pathspace as ps
from benchmarks.figures import keep, write
from benchmarks.measure import alone, peak

TOKENS = torch.arange(16).reshape(2, 8)


def config() -> Any:
    """A Llama of 2 billion weights."""
    return transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=30,
        num_attention_heads=16, tie_word_embeddings=False,
    )  # fmt: skip


def weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights in single precision for a model without values, one after the other."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        # (rows of different sizes, so that there is something to balance)
        noise = torch.randn(tensor.shape, generator=generator) * 0.02
        grown = noise * (1 + torch.arange(len(tensor)) % 7).reshape(-1, *[1] * (tensor.dim() - 1))
        yield name, 1 + noise if tensor.dim() == 1 else grown


def create(folder: Path) -> int:
    """Write the checkpoint in shards of about 1 GB, layer by layer; its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config())
    index: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    total, last = 0, list(model.state_dict())[-1]
    for name, tensor in weights(model):
        held[name] = tensor
        total += tensor.nbytes
        if sum(entry.nbytes for entry in held.values()) > 1e9 or name == last:
            file = f"model-{len(set(index.values())) + 1:05}.safetensors"
            save_file(held, folder / file)
            index |= dict.fromkeys(held, file)
            held = {}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return total


def balance(source: Path, target: Path) -> dict[str, float]:
    """Balance it in this process, which never holds the model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config()).eval()
    graph = ps.trace(model, kwargs={"input_ids": TOKENS})
    start, clock = time.process_time(), time.perf_counter()
    before = peak() / 1e9
    ps.balance_files(graph, source, target)
    return {
        "seconds": time.process_time() - start, "clock": time.perf_counter() - clock,
        "memory_gb_before": before, "memory_gb": peak() / 1e9,
    }  # fmt: skip


@torch.no_grad()
def outputs(folder: Path) -> torch.Tensor:
    """The logits of the whole model."""
    from safetensors import safe_open

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config()).eval()
    model.to_empty(device="cpu")
    # (what the configuration computes)
    model.model.rotary_emb = type(model.model.rotary_emb)(config())
    held = model.state_dict()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                held[name].copy_(opened.get_tensor(name))
    return model(TOKENS).logits


def sentence(figures: dict[str, Any]) -> str:
    """What the page says."""
    return (
        "Measured by `python -m benchmarks.checkpoint`: a Llama of {gigabytes:.1f} GB in {shards}"
        " files, single precision, one thread. Balancing takes {seconds:.0f} s of processor time"
        " and at most {memory_gb:.2f} GB of memory, {memory_gb_before:.2f} GB of that before a file"
        " is opened. The outputs change by {change:.0e} of the largest one."
    ).format(**figures)


def main(folder: Path) -> None:
    """Create, balance, compare, keep."""
    source, target = folder / "given", folder / "balanced"
    size = create(source)
    figures = alone(balance, source, target)
    first = outputs(source)
    change = float((outputs(target) - first).abs().max() / first.abs().max())
    shards = len(list(source.glob("*.safetensors")))
    figures = {"gigabytes": size / 1e9, "shards": shards, **figures, "change": change}
    print(figures)
    keep("checkpoint", figures)
    write("large-models.md", "checkpoint", sentence(figures))
    shutil.rmtree(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
