"""Tensors inside whatever a model takes or returns: containers, caches, objects of the user."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# what holds no tensors, or is not looked into
_FUNCTIONS = (type, nn.Module, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_NUMBERS = (str, int, float, complex)
_CLOSED = (bytes, *_NUMBERS, *_FUNCTIONS)
_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (Tensor, type(None), *_NUMBERS, *_KINDS)


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds in its ``__dict__`` and its slots."""
    slots: list[str] = []
    for kind in type(value).__mro__:
        own = kind.__dict__.get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    names = [name for name in slots if name not in ("__dict__", "__weakref__")]
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def leaves(value: Any) -> list[Any]:
    """The tensors of a value, in a fixed order, each object looked into once.

    Containers that torch knows are flattened as torch does it; other mappings, iterables and
    objects are looked into as they are. A generator is run to its end. Modules are not looked into.
    Numbers that follow from tensors while a model is traced count as tensors.
    """
    found: list[Any] = []
    # held, so that no number of an object is given to another one meanwhile
    seen: dict[int, Any] = {}

    def visit(tree: Any) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor | torch.SymFloat | torch.SymInt | torch.SymBool):
                found.append(leaf)
            elif isinstance(leaf, _CLOSED) or id(leaf) in seen:
                continue
            else:
                seen[id(leaf)] = leaf
                if isinstance(leaf, Mapping):
                    visit(list(leaf.values()))
                elif isinstance(leaf, list | tuple | set | frozenset | Iterator):
                    visit(list(leaf))
                else:
                    visit(list(_attributes(leaf).values()))

    visit(value)
    return found


def real_leaves(value: Any) -> list[Tensor]:
    """The tensors of floating point numbers of a value, see :func:`leaves`."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A value of the same make with every tensor replaced; what holds tensors is copied."""
    known: dict[int, Any] = {}
    kept: list[Any] = []

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, _CLOSED) or not leaves(leaf) or isinstance(leaf, Iterator):
            return leaf
        if id(leaf) in known:
            return known[id(leaf)]
        if type(leaf) in (set, frozenset):
            return type(leaf)(visit(entry) for entry in leaf)
        kept.append(leaf)
        result = known[id(leaf)] = copy.copy(leaf)
        if isinstance(leaf, dict):
            dict.update(result, {key: pytree.tree_map(visit, entry) for key, entry in leaf.items()})
        elif isinstance(leaf, list):
            result[:] = [pytree.tree_map(visit, entry) for entry in leaf]
        for name, held in _attributes(leaf).items():
            object.__setattr__(result, name, pytree.tree_map(visit, held))
        return result

    return pytree.tree_map(visit, value)


def is_plain(value: Any) -> bool:
    """Whether a value consists of tensors and numbers in containers that torch knows."""
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))
