"""Derivatives of models that detach gradients (``detach``, ``no_grad``), as if they did not."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DETACH = frozenset({torch.Tensor.detach, torch.detach})


class IgnoreDetach(TorchFunctionMode):
    """A context in which ``detach`` returns its operand, and ``no_grad`` has no effect.

    Enter it with gradients enabled, because it also ignores attempts to enable them.

    Example:
        >>> import torch
        >>> x = torch.ones(1, requires_grad=True)
        >>> with IgnoreDetach():
        ...     y = x.detach() * 2
        ...     with torch.no_grad():
        ...         y = y + x
        >>> torch.autograd.grad(y, x)[0]
        tensor([3.])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DETACH:
            return args[0].view_as(args[0])
        if getattr(func, "__name__", "") == "_set_grad_enabled":
            return None
        return func(*args, **(kwargs or {}))
