"""Run a model with other values for its parameters and buffers, without changing the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .walk import every_tensor, holders


def evaluate(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """``torch.func.functional_call`` for every model: torch's own leaves a module that is held
    under two names changed, does not find a module of the name of a method, and does not look
    into modules and tensors in lists.

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
    given = {
        id(tensor): tensors[name]
        for kind in ("_parameters", "_buffers")
        for name, tensor in every_tensor(model, kind).items()
        if name in tensors
    }
    places = replacements(model, given)
    before = [held[key] for held, key, _ in places]
    try:
        for held, key, value in places:
            held[key] = value
        return model(*args, **(kwargs or {}))
    finally:
        for (held, key, _), value in zip(places, before, strict=True):
            held[key] = value


def replacements(
    model: nn.Module, given: Mapping[int, Tensor]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Every place in a model where tensors are held that are to be replaced.

    Args:
        model: any module.
        given: id of a tensor -> what to use instead.

    Returns:
        The dictionary, the key, and the value to put there: a tensor, or a container with the
        given tensors in it.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1)
        >>> layer.read = [layer.weight]
        >>> found = replacements(layer, {id(layer.weight): torch.zeros(1, 1)})
        >>> [(key, value) for _, key, value in found]
        [('weight', tensor([[0.]])), ('read', [tensor([[0.]])])]
    """
    found: list[tuple[dict[str, Any], str, Any]] = []
    for _, module, attributes in holders(model):
        for held in (module._parameters, module._buffers):
            found += [(held, key, given[id(v)]) for key, v in held.items() if id(v) in given]
        found += [
            (vars(module), key, pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), value))
            for key, value in attributes
            if any(id(leaf) in given for leaf in pytree.tree_leaves(value))
        ]
    return found
