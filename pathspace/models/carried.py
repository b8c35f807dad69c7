"""A model that takes its state as an input and returns the next one, over several calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError


class Carried(nn.Module):
    """A model whose state goes from one call to the next, as one function of its other inputs.

    A state that is an input and an output has a fixed scale, as every input and output has.
    Carried from call to call it is a value inside the network, and its units may have any scale.
    The first state is 0, which has any scale; the example states only give its shapes.

    Args:
        model: any module; it is the attribute ``model``, so its parameters are called ``model...``.
        carried: name of an input -> position (or key) of the output that becomes this input in the
            next call. A state may be a tensor or a nest of tensors.
        calls: how many calls follow each other. Three contain the zero state, the first and a later
            one.

    Raises:
        InputError: the model has no such input or output, or fewer than two calls are asked for.

    Example:
        >>> import torch, pathspace as ps
        >>> class Language(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.rnn = torch.nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
        ...         self.head = torch.nn.Linear(4, 2)
        ...
        ...     def forward(self, x, h):
        ...         y, h = self.rnn(x, h)
        ...         return self.head(y), h
        >>> model, x, h = Language(), torch.randn(2, 5, 3), torch.zeros(1, 2, 4)
        >>> ps.trace(model, x, h).num_units, ps.trace(ps.Carried(model, {"h": 1}), x, h).num_units
        (0, 4)
    """

    def __init__(self, model: nn.Module, carried: Mapping[str, int | str], calls: int = 3) -> None:
        super().__init__()
        self.model, self.carried, self.calls = model, dict(carried), calls
        known = list(inspect.signature(model.forward).parameters)
        if wrong := [name for name in carried if name not in known]:
            raise InputError(
                f"Carried found the state {wrong[0]!r}, expected an input of"
                f" {type(model).__name__}: {', '.join(known)}."
            )
        if calls < 2:
            raise InputError(f"Carried found calls={calls}, expected 2 or more.")

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The other outputs of all calls, one list for each call."""
        given = inspect.signature(self.model.forward).bind(*args, **kwargs)
        for name in self.carried:
            state = given.arguments.get(name)
            given.arguments[name] = pytree.tree_map_only(Tensor, torch.zeros_like, state)
        found = []
        for _ in range(self.calls):
            outputs = self.model(*given.args, **given.kwargs)
            if isinstance(outputs, Tensor):
                outputs = (outputs,)
            named = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs))
            for name, key in self.carried.items():
                if key not in named:
                    raise InputError(
                        f"Carried found the output {key!r} for the state {name!r}, expected one of"
                        f" {', '.join(map(repr, named))}."
                    )
                given.arguments[name] = named[key]
            found.append([v for key, v in named.items() if key not in self.carried.values()])
        return found
