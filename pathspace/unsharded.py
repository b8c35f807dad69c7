"""A model as it was before it was spread over devices: its structure can be read off without the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# where a module keeps what was done to it
_KEPT = ("__composable_api", "_is_fsdp", "_fsdp")


def is_cut(tensor: Tensor) -> bool:
    """Whether a tensor is spread over devices, so that no process has its numbers."""
    # (its class is slow to import, and only those who have such tensors have paid for that)
    return type(tensor).__name__ == "DTensor"


def of_wrapper(hook: Callable[..., Any]) -> bool:
    """Whether a hook belongs to sharding or to tensor parallelism, not to the model."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def written_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before ``fully_shard`` gave it another one."""
    classes = type(module).__mro__
    names = [found.__name__ for found in classes]
    return classes[names.index("FSDPModule") + 1] if "FSDPModule" in names else classes[0]


def unsharded(model: nn.Module) -> nn.Module:
    """The modules of ``model`` without what spreads them over devices; the tensors, cut or not, are the same.

    Args:
        model: any module; it is left as it is.

    Returns:
        Modules of their own where something was to be taken away, otherwise the model.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> unsharded(model) is model
        True
    """
    every = list(model.modules())
    hooks = [hook for module in every for name in _HOOKS for hook in getattr(module, name).values()]
    if not any(map(of_wrapper, hooks)) and all(written_class(module) is type(module) for module in every):
        return model
    twins: dict[int, nn.Module] = {}
    for module in every:
        kind = written_class(module)
        twins[id(module)] = object.__new__(kind)
    for module in every:
        held = {key: value for key, value in vars(module).items() if not key.startswith(_KEPT)}
        held["_modules"] = held["_modules"].copy()
        for name in [key for key in held if key.endswith("_hooks")]:
            held[name] = type(held[name])((key, hook) for key, hook in held[name].items() if not of_wrapper(hook))
        for name, child in held["_modules"].items():
            held["_modules"][name] = None if child is None else twins[id(child)]
        twins[id(module)].__dict__.update(held)
    return twins[id(model)]


__all__ = ["is_cut", "unsharded"]
