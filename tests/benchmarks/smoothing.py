"""Layer mappings that llm-compressor lists by hand for AWQ, beside the pairs
that the reduction graph has.

`python -m benchmarks.smoothing [NAME ...]` from `tests/`; rows go to `docs/data/smoothing.json`,
the page is written anew. Needs llmcompressor (0.14), whose registry and whose code that resolves it
are used as they are. A model is a small configuration of transformers. A mapping is *found* where a
pair has its layer on one side and all its readers on the other, and no unit of a reader's slice is
another's: readers that the registry leaves out are counted beside it.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader
from zoo.transformers_models import EXPERTS, GROUPED, SMALL, TABLE, WORDS, build, causal

import pathspace as ps
from benchmarks.figures import chosen, each, load, page_of, write
from pathspace.fitting.smoothing import SmoothingPair

Row = dict[str, Any]
Place = tuple[str, set[int]]
NAME, PAGE = "smoothing", "channel-figures.md"
# as many key heads as query heads: the tool leaves out values that several heads read
EVEN = {**GROUPED, "num_key_value_heads": 4}
MOE = {**EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1}
MOE["first_k_dense_replace"] = 1
LATENT = {
    **MOE, "head_dim": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
MIXED = {"mlp_layer_types": ["dense", "sparse"]}
LISTED: dict[str, dict[str, Any]] = {
    **dict.fromkeys("Cohere2 Exaone4 Granite Llama Mistral Olmo Olmo3".split(), EVEN),
    **dict.fromkeys("Phi3 Qwen2 Qwen3 SeedOss".split(), EVEN),
    **{name: {**EVEN, "sliding_window": 4} for name in ("Gemma2", "Gemma3")},
    "Afmoe": {
        **MOE,
        "num_dense_layers": 0,
        "num_shared_experts": 1,
        "layer_types": ["sliding_attention"] * 2,
    },
    "Bloom": {**SMALL, "n_layer": 2, "n_head": 4},
    "Cohere": {**EVEN, "use_qk_norm": False},
    "Cohere2Moe": {**MOE, **MIXED, "intermediate_size": 16, "num_shared_experts": 1},
    "DeepseekV2": LATENT,
    "DeepseekV3": {**LATENT, "first_k_dense_replace": 0},
    "Ernie4_5_Moe": {**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    "Glm4Moe": {**MOE, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "Glm4MoeLite": {**LATENT, **MIXED},
    "GlmMoeDsa": {**LATENT, **MIXED, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": MOE,
}
ABSENT = {
    "NanbeigeForCausalLM": "its code is not part of transformers",
    "Phi3VForCausalLM": (
        "its code is not part of transformers; its language model is that of Phi3ForCausalLM"
    ),
}
UNLISTED = (
    "mixtral gemma gpt_neox falcon opt stablelm starcoder2 phi glm4 nemotron olmoe olmo2 smollm3"
    " granitemoe helium arcee persimmon apertus mpt"
).split()
# whose recipes are given to the tool
RECIPES = ("Llama", "Qwen3", "Phi3")
HALVES = {
    "gate_proj": (0, "gate_up_proj"),
    "up_proj": (1, "gate_up_proj"),
    "down_proj": (None, "down_proj"),
}


def model_of(name: str, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a class, with random weights and inputs."""
    torch.manual_seed(0)
    config = "Gemma3Text" if name == "Gemma3" else name
    model, inputs = build(config, f"{name}ForCausalLM", options, causal)
    return model.eval(), inputs


def listed(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The tool's own mappings for a model: a layer, and the layers that read it."""
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.awq.dynamic_mappings import get_layer_mappings_from_model

    twin = copy.deepcopy(model)
    linearize_moe(twin)
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.quantization_scheme = None
    for mapping in get_layer_mappings_from_model(twin):
        modifier = AWQModifier(mappings=[mapping])
        modifier._set_resolved_mappings(twin)
        for found in modifier._resolved_mappings:
            yield found.smooth_name, list(found.balance_names)


def part(graph: ps.ReductionGraph, name: str, side: str) -> Place:
    """The parameter of a layer, and the units it writes (`head`) or reads (`tail`)."""
    blocks = {block.name: block for block in graph.blocks}
    parent, _, last = name.rpartition(".")
    before, _, number = parent.rpartition(".")
    own = f"{name}.weight"
    index: Any = ()
    if own not in blocks and number.isdigit() and last in HALVES:
        # one expert of a table of experts
        half, table = HALVES[last]
        own = f"{before}.{table}"
        middle = blocks[own].shape[1] // 2 if half is not None else 0
        rows = slice(None) if half is None else slice(half * middle, (half + 1) * middle)
        index = (int(number), rows)
    # (a router may hold its layer)
    own = next((key for key in blocks if key == own or key.startswith(f"{name}.")), "")
    if not own:
        return name, set()
    ids = getattr(blocks[own], side).expand(blocks[own].shape)[index]
    return own, {unit for unit in ids.abs().unique().tolist() if 0 < unit <= graph.num_units}


def why_not(model: nn.Module, graph: ps.ReductionGraph, smooth: str) -> str:
    """Why a mapping has no pair, in the graph's own words."""
    if not list(model.get_submodule(smooth).parameters()):
        kind = type(model.get_submodule(smooth)).__name__
        return (
            f"{kind} has no weights that could take the scale, and is not homogeneous: the function"
            " would change"
        )
    return "; ".join(sorted({pin.reason for pin in graph.pinned})) or "no free scale"


def found_by(
    pairs: Iterable[SmoothingPair], writer: Place, readers: list[Place]
) -> SmoothingPair | None:
    """The pair that moves the scales between a layer and its readers, if there is one."""
    for pair in pairs:
        units = set(pair.units.tolist())
        inside = writer[0] in pair.parameters[0] and writer[1] & units
        if inside and all(
            name in pair.parameters[1] and own & writer[1] & units for name, own in readers
        ):
            return pair
    return None


def rescaled(
    model: nn.Module, graph: ps.ReductionGraph, pairs: list[SmoothingPair], inputs: Row
) -> float:
    """Largest change of the logits in float32 when the units of all exact pairs are rescaled."""
    phi = torch.zeros(graph.num_units, dtype=torch.float64)
    for pair in pairs:
        if pair.exact:
            phi[pair.units - 1] = torch.randn(len(pair.units), dtype=torch.float64)
    with torch.no_grad():
        before = model(**inputs).logits
        after = ps.rescale_(copy.deepcopy(model), graph, phi)(**inputs).logits
    return float((after - before).abs().max() / before.abs().max())


def measured(model: nn.Module, inputs: dict[str, Any]) -> Row:
    """One architecture: its pairs, and the tool's mappings among them."""
    graph = ps.trace(model, kwargs=inputs)
    pairs = ps.smoothing_pairs(graph)
    exact = sum(pair.exact for pair in pairs)
    row: Row = {"model": type(model).__name__, "pairs": len(pairs), "exact": exact}
    row["change"] = rescaled(model, graph, pairs, inputs)
    more, missed = 0, []
    try:
        own = list(listed(model))
    except (ValueError, RuntimeError) as error:
        return {**row, "failure": str(error).splitlines()[0]}
    for smooth, balance in own:
        writer = part(graph, smooth, "head")
        readers = [part(graph, reader, "tail") for reader in balance]
        pair = found_by(pairs, writer, readers)
        if pair is None:
            reason = why_not(model, graph, smooth)
            missed.append({"layer": smooth, "readers": balance, "reason": reason})
        elif set(pair.parameters[1]) - {reader for reader, _ in readers}:
            more += 1
    row |= {"listed": len(own), "found": len(own) - len(missed), "incomplete": more}
    row["missed"] = missed
    return row


def accepted(name: str, options: dict[str, Any], length: int = 8) -> Row:
    """Our recipe, read, applied to a small model and followed by quantisation, by the tool."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from llmcompressor.recipe import Recipe

    model, inputs = model_of(name, options)
    pairs = [pair for pair in ps.smoothing_pairs(ps.trace(model, kwargs=inputs)) if pair.exact]
    text = ps.smoothing_recipe(pairs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text + QUANTISED)
        modifiers = Recipe.create_instance(str(path)).modifiers
        twin = copy.deepcopy(model)
        for module in twin.modules():
            if isinstance(module, nn.Linear):
                module.quantization_scheme = None
        awq = next(modifier for modifier in modifiers if isinstance(modifier, AWQModifier))
        awq._set_resolved_mappings(twin)
        resolved = {(m.smooth_name, tuple(m.balance_names)) for m in awq._resolved_mappings}
        batches = DataLoader([{"input_ids": row} for row in torch.randint(3, WORDS, (8, length))])
        before = model(**inputs).logits.detach()
        model.save_pretrained(Path(folder) / "model")
        # batches are ready, so anything stands for the tokenizer; without an accelerator
        # there is no memory to pin
        with patch.object(IntermediatesCache, "pin_memory"):
            small = oneshot(
                model=type(model).from_pretrained(Path(folder) / "model"), recipe=str(path),
                dataset=batches, num_calibration_samples=8, processor=nn.Identity(),
            )  # fmt: skip
        after = small(**inputs).logits.detach()
    ours = {(pair.writers[0], pair.readers) for pair in pairs if len(pair.writers) == 1}
    return {
        "model": type(model).__name__, "pairs": len(ours), "resolved": len(resolved),
        "same": resolved == ours,
        "quantised": sum(hasattr(module, "quantization_scheme") for module in small.modules()),
        "change": float((after - before).abs().max() / before.abs().max()),
    }  # fmt: skip


QUANTISED = """
    QuantizationModifier:
      targets: [Linear]
      scheme: W8A8
      ignore: [lm_head]
"""


def tables(held: Row) -> str:
    """The figures as they stand on the page."""
    return page_of("smoothing", held=held).rstrip()


def main(names: list[str]) -> None:
    """Measure, keep, write the page."""
    import transformers
    from llmcompressor import __version__
    from llmcompressor.modifiers.transform.awq.mappings import AWQ_MAPPING_REGISTRY

    held = {"listed": {}, "unlisted": {}, "accepted": {}} | load(NAME)
    classes = [name for name in AWQ_MAPPING_REGISTRY if name.endswith("ForCausalLM")]
    assert {f"{name}ForCausalLM" for name in LISTED} | set(ABSENT) == set(classes)
    versions = {"llmcompressor": __version__, "transformers": transformers.__version__}
    held |= {**versions, "absent": ABSENT}

    def unlisted(name: str) -> Row:
        config, ending, options, inputs = TABLE[name]
        if "moe_intermediate_size" in options:
            # (one of both sizes is used by the model, the other by the tool)
            options = {**options, "intermediate_size": options["moe_intermediate_size"]}
        torch.manual_seed(0)
        model, given = build(config, ending, options, inputs)
        assert type(model).__name__ not in classes
        return measured(model.eval(), given)

    own, others = chosen(names, LISTED), chosen(names, UNLISTED)
    each(NAME, held, "listed", own, lambda name: measured(*model_of(name, LISTED[name])))
    each(NAME, held, "unlisted", others, unlisted)
    recipes = [name for name in RECIPES if f"recipe:{name}" in names or not names]
    each(NAME, held, "accepted", recipes, lambda name: accepted(name, LISTED[name]))
    write(PAGE, NAME, tables(held))


if __name__ == "__main__":
    main(sys.argv[1:])
