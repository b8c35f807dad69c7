"""Null directions by cause, on every small model of the zoo and on small
configurations of library models.

`python -m zoo.causes [NAME or PREFIX ...]` from `tests/` measures what is not in
`docs/data/causes.json` yet, adds it, and writes `docs/causes.md`; `--again` measures
everything that is named.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from benchmarks.figures import DOCS, markdown
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
_NO_GAP = (
    "singular values cross the tolerance without a gap, so float64 cannot say how many are zero"
)
# what is likely to be behind the directions that have no cause
LIKELY = {
    "deep_and_cross": (
        "in a product of factors `1 + x w`, one factor grows and the next shrinks; a shift of the"
        " tables supplies the constant that this needs"
    ),
    "pointnet": (
        "the linear maps GL(3) without the common scale, between the predicted matrix `M f + b + I`"
        " and the convolution after it; the three features are in separate rows of `M`, with a"
        " constant of their own"
    ),
    "hf_bert_small": "not known; the same amount for all words that occur",
    "hf_llama_small": _NO_GAP,
    "hf_mistral_small": _NO_GAP,
    "hf_olmo_small": _NO_GAP,
}
HEAD = f"""# Null directions by cause

A null direction is a direction in parameter space that does not change the outputs. This page counts all of them, by
cause, for the small models of the survey's lists (up to {MOST:,} trainable scalars) and for small configurations of
library models. They are the null space of the Jacobian of all outputs, in float64, at random weights near the initial
ones, with at least four times as many outputs as scalars.

The [reduction graph](reduction-graph.md) finds the directions of *rescaling*;
[`degeneracy`](signal-propagation.md#degeneracy) explains the other causes. Permutations of units are discrete
symmetries and have no directions. `python -m zoo.causes` in `tests/` measures; the figures are in
[`data/causes.json`](data/causes.json). Models of these lists that are not on this page have not been measured.

"""  # noqa: E501


class OnDraws(nn.Module):
    """A model on several draws of its inputs, one run for each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, draws: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Tensor:
        parts = [
            leaf for args, kwargs in draws for leaf in tree_leaves(self.model(*args, **kwargs))
        ]
        real = [leaf for leaf in parts if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return torch.cat([leaf.reshape(-1) for leaf in real])


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
                parameter += 0.3 * torch.randn(
                    parameter.shape, generator=generator, dtype=parameter.dtype
                )
    subject = OnDraws(model).train(model.training)
    first = tree_map(double, (args, kwargs))
    try:
        each = subject([first]).numel()
        draws = [
            tree_map(double, entry.make("eval", seed)[1:])
            for seed in range(1, max(3, 4 * count // each + 2) + 1)
        ]
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


KINDS = (
    "dead, rescaling, shift, translation, normal, kernel, scaling, rotation, linear map, redundant"
).split(", ")


def render(rows: Iterable[Mapping[str, Any]]) -> str:
    """The page."""
    rows = sorted(rows, key=lambda row: (row["family"], row["name"]))
    measured = [row for row in rows if "error" not in row]
    open_ends = ("unexplained", "undetermined")
    whole = [row for row in measured if row["clear"] and not any(row[key] for key in open_ends)]
    lines = [f"For {len(whole)} of {len(measured)} models, every direction has a known cause:", ""]
    families = Counter(row["family"] for row in measured)
    explained = Counter(row["family"] for row in whole)
    counts = [[name, str(families[name]), str(explained[name])] for name in sorted(families)]
    lines.append(markdown("family | models | all explained", counts))
    rest = [row for row in measured if row not in whole]
    if rest:
        lines += ["", "The other models, with the likely cause in brackets:", ""]
    for row in rest:
        why = [f"{row[key]} {key}" for key in ("undetermined", "unexplained") if row[key]]
        why += [] if row["clear"] else ["no clear gap between singular values"]
        likely = f" ({LIKELY[row['name']]})" if row["name"] in LIKELY else ""
        where = ", ".join(f"`{name}`" for name in row["left"][:6])
        lines.append(f"* {row['name']}: {', '.join(why)}{likely}; in {where}")
    failed = [row for row in rows if "error" in row]
    if failed:
        lines += ["", "Not measured:", "", *(f"* {row['name']}: {row['error']}" for row in failed)]
    models = []
    for row in measured:
        cells = [row["name"], str(row["parameters"]), str(row["null"])]
        cells += [str(row.get(kind, 0) or "") for kind in KINDS]
        models.append([*cells, str(row["unexplained"])])
    head = f"model | parameters | null | {' | '.join(KINDS)} | unexplained"
    return HEAD + "\n".join([*lines, "", "## Every model", "", markdown(head, models)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names, or how they begin; all by default")
    parser.add_argument("--again", action="store_true", help="measure what has been measured, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = {row["name"]: row for row in json.loads(DATA.read_text())} if DATA.exists() else {}
    for entry in entries():
        wanted = not given.names or any(entry.name.startswith(name) for name in given.names)
        # the large replicas of image models need not be built to be too large
        large = entry.family in ("vision", "attention")
        if large or not wanted or (entry.name in rows and not given.again):
            continue
        start = time.perf_counter()
        row = look(entry)
        if row is None:
            continue
        rows[entry.name] = row
        print(f"{time.perf_counter() - start:.1f} s {row}", flush=True)
        keep(rows.values(), DATA, PAGE, render(rows.values()))


if __name__ == "__main__":
    main()
