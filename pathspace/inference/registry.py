"""Which rule serves which operation.

A rule is a small function ``rule(semantics, *args, **kwargs)`` that is called with the operation's own arguments:
tensors replaced by their ids, parameters by :class:`~pathspace.inference.values.Weight`, numbers left as they are. It
returns ids (or a tuple, for operations with several results).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def rule(*operations: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations named like ``"aten.relu"`` (namespace and name, without overload).

    Args:
        *operations: names; a rule that is there already is replaced.

    Returns:
        A decorator that registers ``rule(semantics, *args, **kwargs)`` and returns it.

    Example:
        >>> from pathspace.inference.registry import RULES, rule
        >>> @rule("mylib.scaled_relu")
        ... def scaled_relu(semantics, x, scale):
        ...     return semantics.activation(x)  # positively homogeneous: the scale passes through
        >>> RULES.pop("mylib.scaled_relu") is scaled_relu
        True
    """

    def register(function: Rule) -> Rule:
        for name in operations:
            RULES[name] = function
        return function

    return register


def operation_name(target: Any) -> str:
    """Name of a node's target without its overload: ``"aten.relu"``, ``"getitem"``."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", str(target))
