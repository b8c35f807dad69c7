"""A model without its sharding, whose structure can be analysed without the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from .walk import every_module

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# prefixes of attributes in which a module stores its sharding
_KEPT = ("__composable_api", "_is_fsdp", "_fsdp")


def is_cut(tensor: Tensor) -> bool:
    """Whether a tensor is sharded over devices, so that no process has all of its values."""
    # (by name, because the class is slow to import)
    return type(tensor).__name__ == "DTensor"


def of_wrapper(hook: Callable[..., Any]) -> bool:
    """Whether a hook belongs to sharding or to tensor parallelism, not to the model."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def written_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before ``fully_shard`` replaced it."""
    classes = type(module).__mro__
    names = [found.__name__ for found in classes]
    return classes[names.index("FSDPModule") + 1] if "FSDPModule" in names else classes[0]


def unsharded(model: nn.Module) -> nn.Module:
    """The modules of ``model`` without sharding; the tensors, sharded or not, are the same.

    Args:
        model: any module; it is not changed.

    Returns:
        New modules if the model is sharded, otherwise the model.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> unsharded(model) is model
        True
    """
    every = every_module(model)
    hooks = [hook for module in every for name in _HOOKS for hook in getattr(module, name).values()]
    if not any(map(of_wrapper, hooks)) and all(
        written_class(module) is type(module) for module in every
    ):
        return model
    twins: dict[int, nn.Module] = {}
    for module in every:
        kind = written_class(module)
        twins[id(module)] = object.__new__(kind)
    for module in every:
        held = {key: value for key, value in vars(module).items() if not key.startswith(_KEPT)}
        held["_modules"] = held["_modules"].copy()
        for name in [key for key in held if key.endswith("_hooks")]:
            held[name] = type(held[name])(
                (key, hook) for key, hook in held[name].items() if not of_wrapper(hook)
            )
        for name, child in held["_modules"].items():
            held["_modules"][name] = None if child is None else twins[id(child)]
        twins[id(module)].__dict__.update(held)
    return twins[id(model)]
