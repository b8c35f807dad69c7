"""Half of the channels of timm models, left out by this library and by Torch-Pruning.

    python tests/benchmarks/pruning.py resnet18:64 vit_tiny_patch16_224:224

Each argument is a model and an image size. Both tools start from the same weights, half of all channels is to go. A
model counts where the smaller one runs and, for this library, equals its masked self. Needs timm and, for the
comparison, torch-pruning.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

import pathspace as ps
from pathspace.surgery import distance, outputs


def build(name: str, size: int) -> nn.Module:
    """The model with random weights, for images of this size where it can be told."""
    import timm

    torch.manual_seed(0)
    try:
        return timm.create_model(name, img_size=size).eval()
    except TypeError:
        return timm.create_model(name).eval()


def ours(model: nn.Module, x: torch.Tensor) -> str:
    """Share of the parameters left, and how far the outputs are from those of the masked model."""
    groups = ps.channels(model, x)
    small = groups.remove(0.5)
    far = distance(outputs(small, (x,), {}), outputs(groups.masked(0.5), (x,), {}))
    return f"{size_of(small) / size_of(model):.2f} of parameters, differs by {far:.0e}"


def theirs(model: nn.Module, x: torch.Tensor) -> str:
    """The same share for Torch-Pruning, which has no masked model to compare with."""
    import torch_pruning as tp

    heads = {
        part.qkv: part.num_heads for part in model.modules() if hasattr(part, "num_heads") and hasattr(part, "qkv")
    }
    last = [part for part in model.modules() if isinstance(part, nn.Linear | nn.Conv2d)][-1]
    small = copy.deepcopy(model)
    names = {part: name for name, part in model.named_modules()}
    moved = dict(small.named_modules())
    pruner = tp.pruner.MagnitudePruner(
        small,
        x,
        importance=tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=[moved[names[last]]],
        num_heads={moved[names[part]]: count for part, count in heads.items()},
        prune_num_heads=bool(heads),
    )
    pruner.step()
    outputs(small, (x,), {})
    return f"{size_of(small) / size_of(model):.2f} of parameters"


def size_of(model: nn.Module) -> int:
    """Number of scalar parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: list[str]) -> None:
    """One line for each model."""
    for argument in arguments:
        name, _, size = argument.partition(":")
        x = torch.randn(2, 3, int(size or 64), int(size or 64))
        found = []
        for tool in (ours, theirs):
            try:
                found.append(tool(build(name, x.shape[-1]), x))
            except Exception as error:
                found.append(f"fails ({type(error).__name__}: {str(error).splitlines()[0][:60]})")
        print(f"{name}: {found[0]} | Torch-Pruning {found[1]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
