"""A model is as it was before it ran."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pathspace.models.isolation import untouched, values_kept
from pathspace.models.running import LARGE
from pathspace.models.values import has_values
from pathspace.models.walk import REGISTERED, every_module

from .recomputation import never_reentrant

# of every module: its attributes, what they were, and copies of its containers
Attributes = list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore all that running a model changes: buffers, attributes of its modules, random states,
    and weights that its code writes into (of models with up to 30 million).

    Inside, reentrant checkpointing is the other one, which has all gradients.
    """
    buffers = [
        (module._buffers, dict(module._buffers))
        for module in every_module(model)
        if isinstance(module._buffers, dict)
    ]
    values = [buffer for buffer in model.buffers() if not is_lazy(buffer) and has_values(buffer)]
    weights = [
        weight
        for weight in model.parameters()
        if not is_lazy(weight) and has_values(weight) and weight.layout == torch.strided
    ]
    if sum(weight.numel() for weight in weights) <= LARGE:
        # (some models write into their weights, as those with a constraint of their norm)
        values += weights
    before, generators = save_attributes(model), generator_states(model)
    with untouched(model), values_kept(values), never_reentrant(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated.*")
        try:
            yield
        finally:
            restore_attributes(before)
            for held, own in buffers:
                held.clear()
                held.update(own)
            for generator, state in generators:
                generator.set_state(state)


def generator_states(model: nn.Module) -> list[tuple[torch.Generator, Tensor]]:
    """The generators that modules hold, and their states."""
    return [
        (value, value.get_state())
        for module in every_module(model)
        for value in vars(module).values()
        if type(value) is torch.Generator
    ]


def save_attributes(model: nn.Module) -> Attributes:
    """What every module holds besides what it has registered, for :func:`restore_attributes`."""
    before = []
    for part in every_module(model):
        kept = {key: value for key, value in vars(part).items() if key not in REGISTERED}
        filled = [value for value in kept.values() if type(value) in (list, dict, set, OrderedDict)]
        before.append((vars(part), kept, [(value, copy.copy(value)) for value in filled]))
    return before


def restore_attributes(before: Attributes) -> None:
    """Give modules back the attributes they had, with containers of the same contents."""
    for held, kept, containers in before:
        for key in held.keys() - kept.keys() - set(REGISTERED):
            del held[key]
        held.update(kept)
        for value, content in containers:
            # (torch iterates over ordered dictionaries of hooks while it calls them)
            if type(value) is OrderedDict and value.keys() == content.keys():
                continue
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
