"""Parameters with several names: cut for a reading, and where a change of basis needs it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .copies import safe_deepcopy
from .walk import every_module, every_path, every_tensor


def cut_ties(model: nn.Module) -> nn.Module:
    """A copy with the same tensors, in which a parameter with several names has copies."""
    twin = safe_deepcopy(model, share_tensors=True)
    seen: set[int] = set()
    for module in every_module(twin):
        for key, parameter in module._parameters.items():
            if id(parameter) in seen and parameter is not None:
                own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                module._parameters[key] = own
            seen.add(id(parameter))
    return twin


@torch.no_grad()
def set_parameters(model: nn.Module, new: Mapping[str, Tensor]) -> None:
    """Write numbers into parameters; one with several names is cut where these differ."""
    places = every_tensor(model, "_parameters")
    names: dict[int, list[str]] = {}
    for name, parameter in places.items():
        names.setdefault(id(parameter), []).append(name)
    modules = dict(every_path(model))
    for alike in names.values():
        first, *others = alike
        parameter = places[first]
        old = parameter.detach().clone() if others else parameter
        for name in others:
            own = new.get(name, old)
            if not torch.equal(own, new.get(first, old)):
                path, _, key = name.rpartition(".")
                modules[path]._parameters[key] = nn.Parameter(own.clone(), parameter.requires_grad)
                untie(model)
        if first in new:
            parameter.copy_(new[first])


def untie(model: nn.Module) -> bool:
    """Let configurations say that the tables at both ends differ; whether one said otherwise."""
    changed = False
    for module in every_module(model):
        config = getattr(module, "config", None)
        for one in (config, getattr(config, "text_config", None)):
            if getattr(one, "tie_word_embeddings", False) is True:
                one.tie_word_embeddings = False  # type: ignore[union-attr]
                changed = True
    return changed
