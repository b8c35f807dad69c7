"""A copy to trace and to measure, so that nothing changes the user's model."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterator
from inspect import iscoroutine
from typing import Any

import torch
from torch import Tensor, nn

from .copies import safe_deepcopy
from .nested import leaves, mapped
from .restored_globals import contents, refill
from .values import unsharded
from .walk import REGISTERED, every_module, module_at

# types of containers that code fills while it runs; hooks are in an ordered dictionary
_FILLED = (list, dict, set, OrderedDict)
# of every module: its attributes, what they were, and the contents of their containers
Attributes = list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]]


def stand_in(model: nn.Module, share_tensors: bool = True) -> nn.Module:
    """A copy of ``model`` that computes the same function and returns its tensors as one tuple.

    Caches of keys and values are switched off, compiled modules run uncompiled,
    and sharding is removed.

    Args:
        model: any module.
        share_tensors: let the copy share the model's tensors.

    Returns:
        The copy, in the mode (train or eval) of the model.

    Raises:
        InputError: the model cannot be copied.

    Example:
        >>> import torch
        >>> class Net(torch.nn.Module):
        ...     def forward(self, x):
        ...         return {"out": x, "name": "net"}
        >>> stand_in(Net())(torch.ones(1))
        (tensor([1.]),)
    """
    twin = safe_deepcopy(unsharded(model), share_tensors)
    make_recordable(twin)
    twin.register_forward_hook(lambda _module, _args, outputs: outputs_of(outputs))
    return twin


def make_recordable(twin: nn.Module) -> None:
    """Let a copy of a model compute the same function by code that can be recorded.

    Caches of keys and values are switched off; compiled modules run uncompiled; batch norms that
    average all batches forget old ones, so that no number of batches is read; transformers read
    their masks as they are, and do not compare them with causal ones; mixtures of experts of the
    library transformers compute all experts at once, without a loop over data.

    Args:
        twin: the copy; it is changed.
    """
    switch_off_caches(twin)
    for module in every_module(twin):
        # made by torch.compile
        written = module._modules.get("_orig_mod")
        if written is not None and "forward" in module.__dict__:
            module.__dict__["forward"] = written.__call__
        if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
            module.register_forward_pre_hook(_told_of_masks, prepend=True, with_kwargs=True)
        if hasattr(module, "running_mean") and getattr(module, "momentum", 0) is None:
            module.momentum = 0.1  # type: ignore[assignment]
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
    if iscoroutine(outputs):
        outputs.close()
        raise TypeError("forward returned a coroutine, expected tensors")
    return tuple(leaves(outputs))


def repeatable(twin: nn.Module, written: Collection[str] = ()) -> nn.Module:
    """Restore a stand-in after each call: its inputs, generators and the attributes of its modules.

    Args:
        twin: a result of :func:`stand_in`; it is changed.
        written: names of parameters that its code writes into; each call
            writes into copies of them.

    Returns:
        The same module.
    """
    places = [
        (module_at(twin, name.rpartition(".")[0]), name.rpartition(".")[2]) for name in written
    ]
    own: list[Any] = []
    generators = generator_states(twin)
    before: list[Attributes] = []

    def again(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        own[:] = [owner._parameters[key] for owner, key in places]
        for (owner, key), tensor in zip(places, own, strict=True):
            owner._parameters[key] = tensor.clone()
        for generator, state in generators:
            generator.set_state(state)
        before[:] = [save_attributes(twin)]
        return mapped(Tensor.clone, (args, kwargs))

    def restored(_module: nn.Module, _args: Any, _outputs: Any) -> None:
        for (owner, key), tensor in zip(places, own, strict=True):
            owner._parameters[key] = tensor
        for kept in before:
            restore_attributes(kept)
        before.clear()

    twin.register_forward_pre_hook(again, prepend=True, with_kwargs=True)
    twin.register_forward_hook(restored, always_call=True)
    return twin


def generator_states(model: nn.Module) -> list[tuple[torch.Generator, Tensor]]:
    """The generators that modules hold, and their states."""
    return [
        (value, value.get_state())
        for module in every_module(model)
        for value in module.__dict__.values()
        if type(value) is torch.Generator
    ]


def save_attributes(model: nn.Module) -> Attributes:
    """What every module holds besides what it has registered, for :func:`restore_attributes`."""
    before = []
    for part in every_module(model):
        kept = {key: value for key, value in vars(part).items() if key not in REGISTERED}
        lists = [(value, contents(value)) for value in kept.values() if type(value) in _FILLED]
        before.append((vars(part), kept, lists))
    return before


def restore_attributes(before: Attributes) -> None:
    """Give modules back the attributes they had, with containers of the same contents."""
    for held, kept, lists in before:
        for key in [key for key in held if key not in kept and key not in REGISTERED]:
            del held[key]
        held.update(kept)
        for value, held_before in lists:
            # (most are dictionaries of hooks, and empty)
            if value or held_before:
                refill(value, held_before)


def switch_off_caches(model: nn.Module) -> None:
    """Set ``use_cache`` to False in every module's ``config``, and in the configurations inside it.

    Args:
        model: a private copy; its configurations are changed.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> model = torch.nn.Identity()
        >>> model.config = SimpleNamespace(
        ...     use_cache=True, text_config=SimpleNamespace(use_cache=True)
        ... )
        >>> switch_off_caches(model)
        >>> model.config
        namespace(use_cache=False, text_config=namespace(use_cache=False))
    """
    seen: set[int] = set()
    for module in every_module(model):
        for config in _configurations(getattr(module, "config", None), seen):
            if getattr(config, "use_cache", None) is True:
                config.use_cache = False


def _configurations(config: Any, seen: set[int]) -> Iterator[Any]:
    """A configuration and the configurations inside it."""
    held = getattr(config, "__dict__", None)
    if held is None or id(config) in seen or isinstance(config, type | nn.Module):
        return
    seen.add(id(config))
    yield config
    for value in list(held.values()):
        if hasattr(value, "use_cache"):
            yield from _configurations(value, seen)
