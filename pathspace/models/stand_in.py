"""A copy to trace and to measure, so that nothing changes the user's model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .copies import safe_deepcopy
from .nested import leaves
from .values import unsharded
from .walk import every_module


def stand_in(model: nn.Module, share_tensors: bool = True) -> nn.Module:
    """A copy of ``model`` that computes the same function and returns its tensors as one tuple.

    Caches are switched off, compiled modules run uncompiled, and sharding is removed.
    """
    twin = safe_deepcopy(unsharded(model), share_tensors)
    make_recordable(twin)
    twin.register_forward_hook(lambda _module, _args, outputs: outputs_of(outputs))
    return twin


def make_recordable(twin: nn.Module) -> None:
    """Let a copy of a model compute the same function by code that can be recorded."""
    switch_off_caches(twin)
    for module in every_module(twin):
        # compiled modules, made by torch.compile, run uncompiled
        written = module._modules.get("_orig_mod")
        if written is not None and "forward" in module.__dict__:
            module.__dict__["forward"] = written.__call__
        # transformers read their masks as they are, and do not compare them with causal ones
        if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
            module.register_forward_pre_hook(_told_of_masks, prepend=True, with_kwargs=True)
        # averages of all batches forget old ones, so that no number of batches is read
        if hasattr(module, "running_mean") and getattr(module, "momentum", 0) is None:
            module.momentum = 0.1  # type: ignore[assignment]
        # mixtures of experts of transformers compute all experts, without a loop over data
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "batched_mm"  # type: ignore[union-attr]


def _told_of_masks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """A causal mask computes the same as the hint that it is one."""
    hint = "is_causal" if isinstance(module, nn.TransformerEncoder) else "tgt_is_causal"
    place = list(inspect.signature(module.forward).parameters).index(hint)
    if len(args) <= place and kwargs.get(hint) is None:
        kwargs = {**kwargs, hint: False}
    return args, kwargs


def outputs_of(outputs: Any) -> tuple[Any, ...]:
    """All tensors in a model's outputs."""
    if inspect.iscoroutine(outputs):
        outputs.close()
        raise TypeError("forward returned a coroutine, expected tensors")
    return tuple(leaves(outputs))


def switch_off_caches(model: nn.Module) -> None:
    """Set ``use_cache`` to False in every module's ``config``."""
    for module in every_module(model):
        if getattr(getattr(module, "config", None), "use_cache", None) is True:
            module.config.use_cache = False  # type: ignore[union-attr]
