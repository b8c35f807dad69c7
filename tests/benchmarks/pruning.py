"""Half of the channels of timm and transformers models, left out by this
library and by Torch-Pruning.

`python -m benchmarks.pruning [NAME ...]` from `tests/`; rows go to `docs/data/pruning.json`, the
tables onto `docs/channel-figures.md`. Both tools start from the same random weights. A model counts
where the smaller one runs and, for this library, equals its masked self to 1e-5 of the largest
output in float32; Torch-Pruning has no masked model to compare with. Needs timm and torch-pruning.
"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import torch
from torch import nn
from zoo.transformers_models import TABLE as TRANSFORMERS
from zoo.transformers_models import build as build_transformers

import pathspace as ps
from benchmarks.figures import chosen, each, load, page_of, write
from pathspace.models.running import distance, outputs
from pathspace.models.stand_in import switch_off_caches

Row = dict[str, Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
NAME, PAGE, SAME = "pruning", "channel-figures.md", 1e-5
# one small model of each family, and the size of its images
TIMM = dict.fromkeys(
    (
        "resnet10t resnext50_32x4d resnetv2_50 nf_resnet26 skresnet18 resnest14d legacy_seresnet18"
        " cspresnet50 res2net50_48w_2s densenet121 vgg11_bn regnetx_002 repvgg_a0 gernet_s"
        " hgnetv2_b0 dla46_c dpn48b ese_vovnet19b_slim_dw selecsls42 mobilenetv2_035"
        " mobilenetv3_small_050 mnasnet_small efficientnet_lite0 tinynet_e lcnet_050 ghostnet_050"
        " hardcorenas_a fastvit_t8 mobileone_s0 repvit_m0_9 starnet_s1 convnext_atto mixer_s32_224"
        " resmlp_12_224 vit_tiny_patch16_224 cait_xxs24_224 xcit_nano_12_p16_224 poolformer_s12"
        " pvt_v2_b0 edgenext_xx_small mobilevit_xxs"
    ).split(),
    64,
)
TIMM |= {"inception_v3": 96, "swin_tiny_patch4_window7_224": 224, "levit_128s": 224}
LANGUAGE = (
    "bert gpt2 llama mistral qwen2 qwen3 gemma2 phi opt bloom falcon t5 bart whisper wav2vec2 vit"
    " dinov2 swin convnext clip"
).split()


def timm_model(name: str, size: int) -> tuple[nn.Module, Inputs]:
    """A model with random weights, for images of this size where it can be told."""
    import timm

    torch.manual_seed(0)
    try:
        model = timm.create_model(name, img_size=size)
    except TypeError:
        model = timm.create_model(name)
    return model.eval(), ((torch.randn(2, 3, size, size),), {})


def transformers_model(name: str) -> tuple[nn.Module, Inputs]:
    """A small configuration with random weights."""
    torch.manual_seed(0)
    model, inputs = build_transformers(*TRANSFORMERS[name])
    switch_off_caches(model)
    return model.eval(), ((), inputs)


def ours(model: nn.Module, inputs: Inputs) -> Row:
    """What is left, and how far the outputs are from those of the masked model."""
    groups = ps.channels(model, *inputs[0], kwargs=inputs[1])
    kept = groups.kept(0.5)
    small = groups.remove(keep=0.5)
    every = sum(len(group) for group in groups)
    gone = sum(len(groups[name]) - len(numbers) for name, numbers in kept.items())
    far = distance(outputs(small, *inputs), outputs(groups.masked(keep=0.5), *inputs))
    left = {"parameters": size_of(small) / size_of(model), "channels": 1 - gone / max(every, 1)}
    return {**left, "change": far}


def theirs(model: nn.Module, inputs: Inputs) -> Row:
    """The same share for Torch-Pruning, with the settings for attention of its examples."""
    import torch_pruning as tp

    last = [part for part in model.modules() if isinstance(part, nn.Linear | nn.Conv2d)][-1]
    small = copy.deepcopy(model)
    names = {part: name for name, part in model.named_modules()}
    several = [part for part in small.modules() if hasattr(part, "num_heads")]
    attention = [part for part in several if hasattr(part, "qkv")]
    heads = {part.qkv: part.num_heads for part in attention}
    pruner = tp.pruner.MagnitudePruner(
        small,
        inputs[0][0],
        importance=tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=[small.get_submodule(names[last])],
        num_heads=heads,
        prune_num_heads=bool(heads),
    )
    pruner.step()
    for part in attention:
        part.num_heads = pruner.num_heads[part.qkv]
        part.head_dim = part.qkv.out_features // (3 * part.num_heads)
    outputs(small, *inputs)
    return {"parameters": size_of(small) / size_of(model)}


def size_of(model: nn.Module) -> int:
    """Number of scalar parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def tried(tool: Any, model: nn.Module, inputs: Inputs) -> Row:
    """What a tool returns, or how it fails."""
    start = time.process_time()
    try:
        found = tool(model, inputs)
    except Exception as error:
        why = str(error).splitlines()[0][:120] if str(error) else ""
        found = {"failure": f"{type(error).__name__}: {why}"}
    return {**found, "seconds": round(time.process_time() - start, 1)}


def stands(row: Row) -> bool:
    """Whether the smaller model is smaller, runs, and equals its masked self."""
    return "failure" not in row and row["parameters"] < 1 and row["change"] <= SAME


def tables(held: dict[str, Any]) -> str:
    """The figures as they stand on the page."""
    return page_of("pruning", held=held, stands=stands).rstrip()


def main(names: list[str]) -> None:
    """Measure, keep, write the page."""
    from importlib.metadata import version

    held = {"timm": {}, "transformers": {}} | load(NAME)
    held["versions"] = {
        package: version(package) for package in ("timm", "torch-pruning", "transformers", "torch")
    }

    def both(name: str) -> Row:
        given = timm_model(name, TIMM[name])
        return {"ours": tried(ours, *given), "theirs": tried(theirs, *given)}

    each(NAME, held, "timm", chosen(names, TIMM), both)
    language = chosen(names, LANGUAGE)
    each(NAME, held, "transformers", language, lambda n: tried(ours, *transformers_model(n)))
    write(PAGE, NAME, tables(held))


if __name__ == "__main__":
    main(sys.argv[1:])
