"""States and the order of parameters: a state knows its parameters by their numbers alone, so
that one loaded in another order would give moments to the wrong weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pathspace.errors import InputError
from pathspace.files.checkpoints import bare


def expect_order(owner: str, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a state of other groups, or of the same parameters in another order.

    Args:
        owner: the optimizer, for messages.
        state: the state, in torch's form.
        groups: the parameter groups of the optimizer that loads it.

    Raises:
        InputError: the groups have other sizes, or parameters with the same names another order.

    Example:
        >>> groups = [{"params": [0, 1], "param_names": ["0.weight", "0.bias"]}]
        >>> other = [{"params": [0, 1], "param_names": ["0.bias", "0.weight"]}]
        >>> expect_order("GSGD", {"param_groups": groups}, groups)
        >>> expect_order("GSGD", {"param_groups": other}, groups)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        pathspace.errors.InputError: GSGD found a state with parameter '0.bias' in place of '0.weight', ...
    """  # noqa: E501
    saved = state["param_groups"]
    sizes, wanted = ([len(group["params"]) for group in each] for each in (saved, groups))
    theirs, ours = _names(saved), _names(groups)
    swapped = [(a, b) for a, b in zip(theirs, ours, strict=False) if bare(a) != bare(b)]
    if swapped and sorted(map(bare, theirs)) == sorted(map(bare, ours)):
        (other, own), *_ = swapped
        raise InputError(
            f"{owner} found a state with parameter {other!r} in place of {own!r}, expected the"
            " parameters in the order of this optimizer; make it with the parameters and groups in"
            " the order in which they were saved."
        )
    if sizes != wanted:
        raise InputError(
            f"{owner} found a state with groups of {sizes} parameters, expected {wanted}; load the"
            " state of an optimizer with the same groups."
        )


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all parameters; none if one is missing."""
    found: list[str] = []
    for group in groups:
        params = group["params"]
        # (torch.distributed.checkpoint puts names in the place of numbers)
        named = bool(params) and all(isinstance(each, str) for each in params)
        names = params if named else group.get("param_names") or []
        if len(names) != len(params):
            return []
        found += names
    return found


def expect_shapes(
    owner: str, state: Mapping[str, Any], parameters: Sequence[Tensor | None]
) -> None:
    """Refuse a state with a tensor of another shape than its parameter.

    Args:
        owner: the optimizer, for messages.
        state: the state, in torch's form.
        parameters: all parameters, in their order; ``None`` for one that may have other tensors.

    Raises:
        InputError: a tensor has another shape.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        entry = state["state"].get(number, {})
        if parameter is None or not isinstance(entry, Mapping):
            continue
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape != parameter.shape:
                raise InputError(
                    f"{owner} found a state with {key!r} of shape {tuple(value.shape)} for a"
                    f" parameter of shape {tuple(parameter.shape)}, expected the same shape; make"
                    " the optimizer with the parameters in the order in which they were saved."
                )


__all__ = ["expect_order", "expect_shapes"]
