"""Copies of models: ``copy.deepcopy``, with tensors that are shared or replaced."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError
from .values import has_values
from .walk import REGISTERED, every_module

M = TypeVar("M", bound=nn.Module)


def safe_deepcopy(
    model: M, share_tensors: bool = False, replaced: Mapping[int, Any] | None = None
) -> M:
    """An independent copy of ``model``.

    Tensors with a gradient history, which a forward pass can leave in a model
    (``torch.nn.utils.prune`` does), are detached. Hooks of objects with a true attribute
    ``stays_behind`` measure the model from outside, and are left out.

    Args:
        model: any module.
        share_tensors: let the copy have the same tensors as the model, so that it costs no memory.
        replaced: id of an object in the model -> what the copy has in its place.

    Returns:
        The copy.

    Raises:
        InputError: an object in the model cannot be copied.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> model.seen = model(torch.ones(1, 2))
        >>> safe_deepcopy(model).seen.requires_grad
        False
    """
    memo = dict(replaced or {})
    observers = {}
    for module in every_module(model):
        for value in pytree.tree_leaves(list(vars(module).values())):
            if isinstance(value, Tensor):
                made = _tensor(value, share_tensors)
                if made is not None:
                    memo.setdefault(id(value), made)
        for hook in _hooks(module).values():
            if stays_behind(hook):
                observers[id(hook)] = memo[id(hook)] = hook
    try:
        try:
            twin = copy.deepcopy(model, dict(memo))
        except (TypeError, pickle.PickleError):
            twin = copy.deepcopy(model, memo | _without_copies(model, memo))
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {reason[0]}),"
            " expected a module that copy.deepcopy can copy; remove the objects that cannot be"
            " copied."
        ) from error
    _leave_out(twin, observers)
    return twin


def _leave_out(twin: nn.Module, observers: Mapping[int, Any]) -> None:
    """Remove the hooks of what measures from outside."""
    for module in every_module(twin) if observers else ():
        for held in (value for key, value in vars(module).items() if key.endswith("_hooks")):
            for number in [number for number, hook in held.items() if id(hook) in observers]:
                del held[number]


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


def _hooks(module: nn.Module) -> dict[Any, Any]:
    """All hooks of a module."""
    held = (value for key, value in vars(module).items() if key.endswith("_hooks") and value)
    return {(id(hooks), number): hook for hooks in held for number, hook in hooks.items()}


def stays_behind(hook: Any) -> bool:
    """Whether a hook belongs to what measures a model from outside.

    Example:
        >>> stays_behind(print)
        False
    """
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
        return (
            nn.Parameter(clone, value.requires_grad) if isinstance(value, nn.Parameter) else clone
        )
    if not value.is_leaf:
        return value.detach() if share else value.detach().clone()
    return value if share else None
