"""A model is as it was before it ran."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pathspace.models.restored_globals import (
    generator_states,
    restore_attributes,
    save_attributes,
    untouched,
    values_kept,
)
from pathspace.models.running import LARGE
from pathspace.models.values import has_values
from pathspace.models.walk import every_module

from .recomputation import never_reentrant


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
