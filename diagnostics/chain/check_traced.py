"""Whether a running model makes the additions of its trace, because nodes are identified
by their number in a call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from pathspace.errors import UnsupportedError

from .addition_hooks import Addition, Kinds, Site

if TYPE_CHECKING:
    from .nodes import Nodes

_REMEDY = "trace it in the mode, and with the kind of inputs, in which it will run."


class Traced:
    """Compares the additions of every module call with those of its calls in the trace.

    A call without additions has no node (stochastic depth). If all additions of a module have the
    same form and are nodes, a call with fewer additions is accepted. Scalars are not counted.
    Without gradients nothing is compared.

    Args:
        chain: the traced chain.

    Example:
        >>> from torch import nn
        >>> from pathspace.diagnostics import MarkovChain
        >>> class Steps(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.cell, self.count = nn.Linear(2, 2), 3
        ...
        ...     def forward(self, x):
        ...         for _ in range(self.count):
        ...             x = x + self.cell(x)
        ...         return x
        >>> traced = Traced(MarkovChain.trace(Steps(), torch.ones(1, 2)))
        >>> traced.check("", ((2, 2, 1.0),) * 3, {})
        >>> traced.check("", ((2, 2, 1.0),) * 5, {})
        Traceback (most recent call last):
            ...
        pathspace.errors.UnsupportedError: Module '' of Steps makes 5 additions in this call and made 3 ...
    """  # noqa: E501

    def __init__(self, chain: Nodes) -> None:
        self.model = type(chain.model).__name__
        self.known = chain.additions
        self.nodes: dict[str, list[tuple[int, float]]] = {}
        for node in chain.nodes:
            self.nodes.setdefault(node.site.module, []).append((node.direction, node.scale))
        # modules that must be called as often as in the trace, because their calls differ
        self.counted = {module: len(self.known[module]) for module, _ in chain.differing()}
        self.alike = {name for name, roles in self.nodes.items() if self._alike(name, roles, chain)}

    def _alike(self, name: str, roles: list[tuple[int, float]], chain: Nodes) -> bool:
        kinds = {kind for call in self.known[name] for kind in call}
        nodes = {(node.site.order) for node in chain.nodes if node.site.module == name}
        alike = len(set(roles)) == len(kinds) == 1 and nodes == set(range(self._most(name)))
        return alike and name not in self.counted

    def _most(self, name: str) -> int:
        return max(map(len, self.known[name]), default=0)

    def check(self, name: str, kinds: Kinds, calls: Mapping[str, int]) -> None:
        """Raise an error if the additions of a call of a module with
        nodes differ from the trace, or the number of calls where calls differ.
        """
        if not name and torch.is_grad_enabled():
            for module, number in self.counted.items():
                if calls.get(module, 0) not in (0, number):
                    self._refuse_number(module, calls[module])
        if (
            name not in self.nodes
            or not kinds
            or kinds in self.known[name]
            or not torch.is_grad_enabled()
        ):
            return
        if (
            name in self.alike
            and len(kinds) < self._most(name)
            and any(set(kinds) <= set(k) for k in self.known[name])
        ):
            return
        counts = sorted({len(call) for call in self.known[name]})
        made = " or ".join(map(str, counts))
        others = "" if len(kinds) not in counts else " of other shapes or factors"
        raise UnsupportedError(
            f"Module {name!r} of {self.model} makes {len(kinds)} additions in this call and made"
            f" {made}{others} when its chain was traced; {_REMEDY}"
        )

    def _refuse_number(self, module: str, made: int) -> None:
        raise UnsupportedError(
            f"Module {module!r} of {self.model} is called {made} times and was called"
            f" {self.counted[module]} times when its chain was traced, and its calls have"
            f" different roles in the chain; {_REMEDY}"
        )

    def differs(self, site: Site) -> None:
        """Raise an error if the role of an addition depends on the call, and the call is new."""
        if site.call >= self.counted.get(site.module, math.inf) and torch.is_grad_enabled():
            self._refuse_number(site.module, site.call + 1)

    def check_addition(self, addition: Addition) -> None:
        """Raise an error for a possible residual addition of a module that
        did not run in the trace.
        """
        left, right, name = addition.left, addition.right, addition.site.module
        if name in self.known or left.shape != right.shape:
            return
        if left.requires_grad and right.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"Module {name!r} of {self.model} adds two activations and did not run when its"
                " chain was traced; " + _REMEDY
            )
