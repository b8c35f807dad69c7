"""Tensors as transformers writes them, where that differs from how a model holds them.

Since version 5 the experts of a layer are one tensor in memory, and one tensor each on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ..errors import InputError

# conversions that put entries elsewhere and change none
PLACING = frozenset(["Chunk", "SplitModulelist", "Transpose", "_IdentityOp"])


class _View(Tensor):
    """A tensor with repeated entries that stays a view, however large its shape is."""

    def contiguous(self, *_: Any, **__: Any) -> Tensor:
        return self


def conversions(folder: Path) -> list[Any]:
    """How transformers converts the checkpoint in a folder when it reads it; empty if not."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ImportError):
        return []
    # (a prefix depends on the class that the model was loaded with)
    every = get_checkpoint_conversion_mapping(kind) or []  # type: ignore[no-untyped-call]
    return [one for one in every if type(one).__name__ != "PrefixChange"]


def as_saved(
    found: list[Any], tensors: Mapping[str, tuple[Tensor, ...]]
) -> dict[str, tuple[str, tuple[Tensor, ...], tuple[int, ...]]]:
    """What lies where each saved tensor lies.

    ``tensors`` has, by name in the model, numbers for each entry of the parameter, in its shape.
    The result has, by name on disk, the name in the model, its part of the numbers (dimensions
    along which they repeat have size 1), and its shape.
    """
    from transformers import core_model_loading

    revert: Any = core_model_loading.revert_weight_conversion
    owner = SimpleNamespace(_weight_conversions=found, config=None)
    reverted = [one.reverse_transform() for one in found]
    kinds = {type(step).__name__ for one in reverted for step in getattr(one, "operations", ())}
    if not kinds <= PLACING:
        raise InputError(
            "The checkpoint is stored in another form than the model has in memory"
            f" ({', '.join(sorted(kinds - PLACING))}), expected a split of its tensors at most;"
            " write model.state_dict() with safetensors.torch.save_file, and give that file."
        )
    # (the last tensor of each name says which it is)
    numbered = {
        name: (*own, own[0].new_full((), number).expand(own[0].shape))
        for number, (name, own) in enumerate(tensors.items())
    }
    parts = []
    for place in range(max((len(own) for own in numbered.values()), default=0)):
        state = {name: own[place].as_subclass(_View) for name, own in numbered.items()}
        parts.append(revert(owner, state))
    names = list(tensors)
    return {
        name: (
            names[int(parts[-1][name].flatten()[0])],
            tuple(_folded(part[name].as_subclass(Tensor)) for part in parts[:-1]),
            tuple(parts[-1][name].shape),
        )
        for name in (parts[0] if parts else ())
    }


def _folded(tensor: Tensor) -> Tensor:
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor
