"""Restores global variables and class attributes that a model's code changes while it is traced."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .copies import is_bound
from .isolation import random_kept
from .values import has_values
from .walk import SIMPLE, every_module

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_LIBRARY = ("torch.", "builtins", "pathspace.")


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors with values that modules hold as ordinary attributes."""
    return [
        value
        for module in every_module(model)
        for value in vars(module).values()
        if type(value) not in SIMPLE and isinstance(value, Tensor) and has_values(value)
    ]


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context at whose end tensors have the values that they had.

    Args:
        tensors: those that code may write into.

    Example:
        >>> import torch
        >>> count = torch.zeros(1)
        >>> with values_kept([count]):
        ...     _ = count.add_(1)
        >>> count
        tensor([0.])
    """
    held = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in held:
            # through .data, because autograd checks the version of tensors that it needs
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.data.copy_(value)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A context at whose end global names and containers that the code of a model
    has changed are restored, and tensors that its modules hold as ordinary attributes.

    Random states and torch's settings are restored too.

    Args:
        model: the model whose code will run.

    Example:
        >>> import torch
        >>> class Net(torch.nn.Module):
        ...     __module__ = "mine"
        ...     seen = []
        ...
        ...     def forward(self, x):
        ...         self.seen.append(x)
        ...         return x
        >>> with untouched(Net()):
        ...     _ = Net()(torch.ones(1))
        >>> Net.seen
        []
    """
    classes = {
        kind for module in every_module(model) for kind in type(module).__mro__ if _is_users(kind)
    }
    functions = [function for kind in classes for function in _functions(kind.__dict__.values())]
    hooks = [hook for module in every_module(model) for hook in _hooks(module)]
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
        hooks += getattr(nn.modules.module, name, {}).values()
    functions += [function for function in _functions(hooks) if _is_users(function)]
    names = {
        (id(f.__globals__), name): (f.__globals__, name)
        for f in functions
        for name in _names(f.__code__)
    }
    rebound = [(space, name, space[name]) for space, name in names.values() if name in space]
    attributes = [
        (kind, {key: value for key, value in kind.__dict__.items() if not key.startswith("__")})
        for kind in classes
    ]
    values = [value for _, _, value in rebound] + [
        value for _, held in attributes for value in held.values()
    ]
    kept = {id(value): (value, contents(value)) for value in values if type(value) in _CONTAINERS}
    differentiating, default = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        with random_kept(), values_kept(plain_tensors(model)):
            yield
    finally:
        torch.set_grad_enabled(differentiating)
        torch.set_default_dtype(default)
        for value, before in kept.values():
            refill(value, before)
        for space, name, value in rebound:
            if space.get(name) is not value:
                space[name] = value
        for kind, held in attributes:
            for key in [
                key for key in kind.__dict__ if not key.startswith("__") and key not in held
            ]:
                delattr(kind, key)
            for key, value in held.items():
                if kind.__dict__.get(key) is not value:
                    setattr(kind, key, value)


def _is_users(thing: Any) -> bool:
    return not f"{thing.__module__}.".startswith(_LIBRARY)


def _hooks(module: nn.Module) -> Iterator[Any]:
    own = vars(module)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        yield from own.get(name, {}).values()


def _functions(values: Any) -> Iterator[types.FunctionType]:
    """Python functions among values, and the functions inside their wrappers."""
    for value in values:
        inner = getattr(value, "__func__", getattr(value, "func", value))
        if isinstance(inner, property):
            yield from _functions([inner.fget, inner.fset])
        while isinstance(inner, types.FunctionType):
            yield inner
            # functions that it refers to by a closure
            held = [cell.cell_contents for cell in inner.__closure__ or () if is_bound(cell)]
            yield from (value for value in held if isinstance(value, types.FunctionType))
            inner = getattr(inner, "__wrapped__", None)


def _names(code: types.CodeType) -> Iterator[str]:
    """Global names that code, and the functions in it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def contents(value: Any) -> Any:
    """What a container holds, for :func:`refill`."""
    return dict(value) if isinstance(value, dict) else list(value)


def refill(value: Any, before: Any) -> None:
    """Give a container back what it held, if it holds something else.

    (Torch iterates over the dictionary of hooks while it calls them, so it must not
    be changed without need.)
    """
    if not _same(value, before):
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(before)


def _same(value: Any, before: Any) -> bool:
    """Whether a container holds the same objects as before."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        pairs = zip(value.items(), before.items(), strict=True)
        return all(key is other and entry is former for (key, entry), (other, former) in pairs)
    return all(one is other for one, other in zip(value, before, strict=True))
