"""Run a model with other values for its parameters and buffers, without changing the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def evaluate(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """``torch.func.functional_call`` for every model: torch's own leaves a module that is held
    under two names changed.

    Args:
        model: any module.
        tensors: what to use instead, by the name of a parameter or buffer; a shared tensor is
            replaced everywhere, whichever of its names is given.
        args: inputs.
        kwargs: inputs by keyword.

    Returns:
        What the model returns.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> twice = torch.nn.ModuleDict({"a": layer, "b": layer})
        >>> twice.forward = lambda x: twice["b"](twice["a"](x))
        >>> evaluate(twice, {"a.weight": torch.tensor([[3.0]])}, (torch.ones(1, 1),))
        tensor([[9.]])
        >>> layer.weight is twice["a"].weight and type(layer.weight) is torch.nn.Parameter
        True
    """
    given = {}
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        given.update({id(tensor): tensors[name] for name, tensor in named if name in tensors})
    # every place that holds one of them, once
    places = {
        f"{path}.{key}" if path else key: given[id(tensor)]
        for path, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if id(tensor) in given
    }
    return functional_call(model, places, tuple(args), dict(kwargs or {}), tie_weights=False)


__all__ = ["evaluate"]
