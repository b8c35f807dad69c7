"""Copies of models as they are met: after a run, with locks and open files in them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from pathspace.errors import InputError

M = TypeVar("M", bound=nn.Module)


def duplicate(model: M) -> M:
    """A copy of ``model`` that can be changed without changing it.

    Tensors with a history, which a forward pass has left in the model (``torch.nn.utils.prune`` does), are detached;
    what cannot be copied at all (a lock, an open file) is shared.

    Args:
        model: any module.

    Returns:
        The copy.

    Raises:
        InputError: something in the model refuses to be copied.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> model.seen = model(torch.ones(1, 2))
        >>> duplicate(model).seen.requires_grad
        False
    """
    try:
        return copy.deepcopy(model, _memo(model))
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), expected a module that "
            "copy.deepcopy copies; take out of it what cannot be copied."
        ) from error


def _memo(model: nn.Module) -> dict[int, Any]:
    """What ``copy.deepcopy`` is to take for the objects in ``model`` that it cannot copy."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple | set):
            waiting += value
        else:
            try:
                # an object that tells how it is made can be copied, once what it holds can
                value.__reduce_ex__(4)
                waiting += getattr(value, "__dict__", {}).values()
            except Exception:
                memo[id(value)] = value
    return memo
