"""Tensors with shapes but without values: on the meta device, of a fake mode, or sharded.
A structure needs no more.

Weights without values count as different from 0, and floating-point buffers do not count as masks.
Integers in buffers (positions, tables) select the weights that are read, so that an error names a
buffer of integers without values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import InputError
from .walk import every_module

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# larger tensors are neither computed nor read
LARGEST_BUFFER = 1 << 24
_MADE = frozenset([torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn])


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values, not only a shape; a sharded tensor counts as without values."""
    # (by name, because the classes are private or slow to import)
    return not tensor.is_meta and type(tensor).__name__ not in ("FakeTensor", "DTensor")


def names_without_values(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors without values."""
    return [name for name, tensor in tensors if not has_values(tensor)]


def require_values(who: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors without values, for a function that needs them."""
    named = dict(tensors)
    lacking = [name for name, each in named.items() if is_lazy(each) or not has_values(each)]
    if not lacking:
        return
    if is_lazy(named[lacking[0]]):
        why = "without a shape yet, expected numbers; run the model once on a batch"
    elif sharded(named[lacking[0]]):
        why = (
            "sharded over devices, expected whole tensors; do this before the model is sharded:"
            " names and units are the same"
        )
    else:
        why = (
            "without values (on the meta device or of a fake mode), expected numbers; load or"
            " initialise the weights first"
        )
    raise InputError(f"{who} found {lacking[0]!r}{' and others' * (len(lacking) > 1)} {why}.")


def require_runnable(who: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors without values; sharded ones are whole while they are used."""
    require_values(
        who, ((name, each) for name, each in tensors if is_lazy(each) or not sharded(each))
    )


@contextmanager
def with_numbers() -> Iterator[None]:
    """New tensors have values, even under a fake mode or with the default device meta."""
    meta = torch.get_default_device().type == "meta"
    with _disable_current_modes(), torch.device("cpu") if meta else nullcontext():
        yield


@contextmanager
def on_cpu() -> Iterator[None]:
    """New tensors have values and are on the CPU, whatever the default device is."""
    # (setting a default device slows down every call of torch)
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with with_numbers(), device, torch.inference_mode(False):
        yield


class _SmallTensors(TorchFunctionMode):
    """Creates large tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MADE and kwargs.get("device") is None:
            shape = func(*args, **{**kwargs, "device": "meta"})
            if shape.numel() > LARGEST_BUFFER:
                return shape
        return func(*args, **kwargs)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build models without values of their parameters; buffers (positions, masks) have values.

    Each parameter moves to the meta device when a module registers it, so that a model of any
    size needs almost no memory. :func:`pathspace.trace`, skeletons, proofs and
    :func:`pathspace.verify` accept such a model.

    Example:
        >>> import torch, pathspace as ps
        >>> with ps.without_weights():
        ...     layer = torch.nn.Linear(1_000_000, 1_000_000)
        >>> layer.weight.numel(), layer.weight.device
        (1000000000000, device(type='meta'))
    """

    def without_values(_module: nn.Module, _name: str, param: Any) -> Any:
        if type(param) is not nn.Parameter or not has_values(param):
            return None
        shape = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        shape.__dict__.update(param.__dict__)
        return shape

    hook = register_module_parameter_registration_hook(without_values)
    try:
        with _SmallTensors():
            yield
    finally:
        hook.remove()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# prefixes of attributes in which a module stores its sharding
_KEPT = ("__composable_api", "_is_fsdp", "_fsdp")


def sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is sharded over devices, so that no process has all of its values."""
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
    """The model, or if it is sharded, new modules with the same tensors and no sharding."""
    every = every_module(model)
    hooks = [hook for module in every for name in _HOOKS for hook in getattr(module, name).values()]
    wrapped = any(written_class(module) is not type(module) for module in every)
    if not wrapped and not any(map(of_wrapper, hooks)):
        return model
    twins = {id(module): object.__new__(written_class(module)) for module in every}
    for module in every:
        held = {key: value for key, value in vars(module).items() if not key.startswith(_KEPT)}
        for name, hooks in held.items():
            if name.endswith("_hooks"):
                own = [(key, hook) for key, hook in hooks.items() if not of_wrapper(hook)]
                held[name] = type(hooks)(own)
        held["_modules"] = {
            name: None if child is None else twins[id(child)]
            for name, child in module._modules.items()
        }
        vars(twins[id(module)]).update(held)
    return twins[id(model)]
