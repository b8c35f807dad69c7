"""Copies of models: ``copy.deepcopy``, with tensors that are shared, replaced or cut apart."""

from __future__ import annotations

import copy
import pickle
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError, first_line
from .values import has_values
from .walk import REGISTERED, every_module, every_path, every_tensor, may_hold

M = TypeVar("M", bound=nn.Module)
# containers for which copy.deepcopy takes long, also where they are empty, as most hooks are
SLOW = (OrderedDict, set)


def safe_deepcopy(
    model: M, share_tensors: bool = False, replaced: Mapping[int, Any] | None = None
) -> M:
    """An independent copy of ``model``, or one with the same tensors; objects whose ids are in
    ``replaced`` have what stands there in their place.

    Tensors with a gradient history, which a forward pass can leave in a model
    (``torch.nn.utils.prune`` does), are detached. Hooks of objects with a true attribute
    ``stays_behind`` measure the model from outside, and are left out.
    """
    every = [
        hook
        for module in every_module(model)
        for hooks in _hooks(module)
        for hook in hooks.values()
    ]
    observers = {id(hook): hook for hook in every if _stays_behind(hook)}
    memo = dict(_instead(model, share_tensors)) | dict(replaced or {}) | observers
    try:
        try:
            twin = copy.deepcopy(model, dict(memo))
        except (TypeError, pickle.PickleError):
            twin = copy.deepcopy(model, memo | _without_copies(model, memo))
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(
            f"{type(model).__name__} cannot be copied ({why}), expected a module that copy.deepcopy"
            " can copy; remove the objects that cannot be copied."
        ) from error
    for held in (hooks for module in every_module(twin) for hooks in _hooks(module)):
        for number in [number for number, hook in held.items() if id(hook) in observers]:
            del held[number]
    return twin


def _instead(model: nn.Module, share: bool) -> Iterator[tuple[int, Any]]:
    """Ids of objects in a model, and what its copy has in their place."""
    for module in every_module(model):
        own = [value for key, value in vars(module).items() if key != "_modules"]
        for value in own:
            if type(value) in SLOW and not value:
                yield id(value), type(value)()
        for value in pytree.tree_leaves(list(filter(may_hold, own))):
            made = _tensor(value, share) if isinstance(value, Tensor) else None
            if made is not None:
                yield id(value), made


def _without_copies(model: nn.Module, memo: dict[int, Any]) -> dict[int, Any]:
    """The attributes of modules that cannot be copied (a lock, an open file), to be shared."""
    found = {}
    for module in every_module(model):
        for key, value in vars(module).items():
            if key not in REGISTERED:
                try:
                    copy.deepcopy(value, dict(memo))
                except (TypeError, pickle.PickleError):
                    found[id(value)] = value
    return found


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    """The dictionaries of hooks of a module (a graph module keeps hooks of its own in lists)."""
    held = [value for key, value in vars(module).items() if key.endswith("_hooks")]
    return [value for value in held if isinstance(value, dict)]


def _stays_behind(hook: Any) -> bool:
    """Whether a hook belongs to what measures a model from outside."""
    while type(hook) is partial:
        hook = hook.func
    return type(hook) is types.MethodType and getattr(hook.__self__, "stays_behind", False) is True


def _tensor(value: Tensor, share: bool) -> Tensor | None:
    """The replacement for a tensor; ``None`` for an ordinary copy."""
    shapes = not has_values(value) and not share
    if shapes or (value.is_inference() and not torch.is_inference_mode_enabled()):
        # (inference tensors take no part in autograd; copy.deepcopy would read memory that
        # tensors without values do not have)
        clone = value.detach().clone()
        kept = isinstance(value, nn.Parameter)
        return nn.Parameter(clone, value.requires_grad) if kept else clone
    if not value.is_leaf:
        return value.detach() if share else value.detach().clone()
    return value if share else None


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
    places, modules = every_tensor(model, "_parameters"), dict(every_path(model))
    first: dict[int, str] = {}
    for name, parameter in places.items():
        known = first.setdefault(id(parameter), name)
        own, shared = new.get(name, parameter), new.get(known, parameter)
        if own is not shared and not torch.equal(own, shared):
            path, _, key = name.rpartition(".")
            modules[path]._parameters[key] = nn.Parameter(own.clone(), parameter.requires_grad)
            untie(model)
    for name in first.values():
        if name in new:
            places[name].copy_(new[name])


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
