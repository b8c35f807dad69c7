"""Null directions by cause, on every small model of the zoo and on small
configurations of library models.

`python -m zoo.causes [NAME or PREFIX ...]` from `tests/` measures what is named, or else what is
not in `docs/data/causes.json` yet, adds it, and writes `docs/causes.md`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from benchmarks.figures import DOCS, page_of
from cases import network
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pathspace import trace
from pathspace.diagnostics import degeneracy
from pathspace.errors import first_line
from zoo import transformers_models
from zoo.entry import Entry, load
from zoo.page import keep

DATA, PAGE = DOCS / "data" / "causes.json", DOCS / "causes.md"
MOST = 3000
# configurations of library models, smaller: key -> value in place of what the zoo has
SMALLER = {
    "vocab_size": 13, "hidden_size": 8, "n_embd": 8, "d_model": 8, "dim": 8, "hidden_dim": 12,
    "intermediate_size": 12,
    "ffn_dim": 12, "word_embed_proj_dim": 8, "num_hidden_layers": 1, "n_layer": 1, "n_layers": 1,
    "num_layers": 1,
    "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 8, "n_positions": 8, "embedding_size": 4, "d_inner": 12, "dff": 12,
    "attention_heads": 2,
    "n_inner": 12, "attention_hidden_size": 8, "context_length": 8, "rotary_dim": 2,
}  # fmt: skip
LIBRARY = (
    "albert arcee bert bert_generation biogpt bloom cohere cohere2 ctrl deberta distilbert"
    " electra ernie4_5 esm exaone4 falcon falcon_alibi fnet gemma gemma2 glm glm4 gpt gpt2"
    " gpt_bigcode gpt_neox granite helium llama llama_relu mistral mpnet nemotron olmo olmo2 opt"
    " persimmon phi phi3 qwen2 qwen3 roberta roformer seed_oss smollm3 stablelm starcoder2"
    " xlm_roberta xlnet"
).split()


def on_draws(model: nn.Module) -> nn.Module:
    """A model on several draws of its inputs, one run for each."""

    def forward(net: Any, draws: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Tensor:
        parts = (leaf for args, kwargs in draws for leaf in tree_leaves(net.model(*args, **kwargs)))
        real = [leaf for leaf in parts if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return torch.cat([leaf.reshape(-1) for leaf in real])

    return network(forward, model=model).train(model.training)


def smaller(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a library model with small sizes."""
    return {key: SMALLER.get(key, value) for key, value in options.items()}


def entries() -> Iterator[Entry]:
    """Everything that is looked at."""
    yield from load().values()
    for name in LIBRARY:
        config, ending, options, inputs = transformers_models.TABLE[name]

        def build(
            c: str = config, e: str = ending, o: Mapping[str, Any] = options, i: Any = inputs
        ) -> tuple[Any, ...]:
            kept = transformers_models.WORDS
            try:
                transformers_models.WORDS = SMALLER["vocab_size"]
                return transformers_models.build(c, e, smaller(o), i)
            finally:
                transformers_models.WORDS = kept

        yield Entry(f"hf_{name}_small", "transformers, small", build)


def double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def look(entry: Entry) -> dict[str, Any] | None:
    """One model: what its null directions come from; `None` for models that are too large."""
    model, args, kwargs = entry.make("eval" if "eval" in entry.modes else entry.modes[0])
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if count > MOST:
        return None
    row: dict[str, Any] = {"name": entry.name, "family": entry.family, "parameters": count}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.double().parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += 0.3 * noise
    subject = on_draws(model)
    first = tree_map(double, (args, kwargs))
    try:
        each = subject([first]).numel()
        seeds = range(1, max(3, 4 * count // each + 2) + 1)
        draws = [tree_map(double, entry.make("eval", seed)[1:]) for seed in seeds]
        found = degeneracy(subject, draws, graph=trace(subject, [first]))
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}".split(" (at ")[0]
        return {**row, "error": why[:200]}
    causes: Counter[str] = Counter()
    for each_of in found.symmetries:
        causes[each_of.cause] += each_of.directions
    left = [
        share.parameter.removeprefix("model.")
        for share in found.tensors
        if (share.unexplained or 0) > 0.1
    ]
    return {
        **row, "null": found.deficit, "dead": found.dead, "rescaling": found.gauge, **causes,
        "undetermined": found.undetermined, "unexplained": found.unexplained, "clear": found.clear,
        "left": left if found.unexplained else [],
    }  # fmt: skip


def whole(row: Mapping[str, Any]) -> bool:
    """Whether every direction has a known cause."""
    return bool(row["clear"]) and not row["unexplained"] and not row["undetermined"]


def render(rows: Iterable[Mapping[str, Any]]) -> str:
    """The page."""
    ordered = sorted(rows, key=lambda row: (row["family"], row["name"]))
    return page_of("causes", rows=ordered, whole=whole, most=MOST)


def main(names: list[str]) -> None:
    """Measure what is named, or else what has not been measured; write data and page."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = {row["name"]: row for row in json.loads(DATA.read_text())}
    for entry in entries():
        wanted = entry.name.startswith(tuple(names)) if names else entry.name not in rows
        # the large replicas of image models need not be built to be too large
        row = look(entry) if wanted and entry.family not in ("vision", "attention") else None
        if row is not None:
            rows[entry.name] = row
            print(row, flush=True)
            keep(rows.values(), DATA, PAGE, render(rows.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
