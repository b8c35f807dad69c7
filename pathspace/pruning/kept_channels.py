"""Which channels of a group to keep: a share of them by score, a boolean mask, or their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, InputTypeError


def share_of(value: Any) -> float | None:
    """A share of channels; ``None`` for what is not a number."""
    value = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def what_stays(owner: str, keep: Any, remove: Any) -> Any:
    """What to keep: one share, or a mapping from groups."""
    if keep is not None and remove is not None:
        raise InputTypeError(
            f"{owner} found both {keep=} and {remove=}, expected keep= for the channels that stay"
            " or remove= for the share that goes; name one of them."
        )
    if remove is not None:
        gone = share_of(remove)
        if gone is None or not 0 <= gone < 1:
            raise InputError(
                f"{owner} found {remove=}, expected a share of channels from 0 to below 1; keep="
                " takes indices of channels by group."
            )
        return 1 - gone
    share = 0.5 if keep is None else share_of(keep)
    if share is None and not isinstance(keep, Mapping):
        raise InputTypeError(
            f"{owner} found {keep=}, expected a share of channels, or a dict from groups to shares,"
            " masks or indices of channels."
        )
    return keep if share is None else share


def _whole_numbers(name: str, value: Any) -> Tensor:
    try:
        numbers: Tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.zeros(1)
    if numbers.numel() and (numbers.is_floating_point() or numbers.is_complex()):
        raise InputTypeError(
            f"{name!r} found {value!r}, expected a share of channels, a boolean mask, or the"
            " indices of channels."
        )
    return numbers


def whole_order(name: str, size: int, value: Any) -> Tensor:
    """An order of all channels of a group."""
    numbers = _whole_numbers(name, value).long().reshape(-1)
    if sorted(numbers.tolist()) != list(range(size)):
        raise InputError(
            f"{name!r} found no permutation of its {size} channels; give every number once."
        )
    return numbers


def kept_numbers(name: str, size: int, value: Any, scores: Tensor | None) -> Tensor:
    """The channels to keep, ascending: a share of the highest scores, a mask, or numbers."""
    share = share_of(value)
    if share is not None:
        if not 0 < share <= 1:
            raise InputError(
                f"{name!r} found keep={share!r}, expected a share of channels above 0 and up to 1."
            )
        assert scores is not None
        return scores.topk(max(1, math.ceil(share * size - 1e-9))).indices.sort().values
    numbers: Tensor = _whole_numbers(name, value)
    if numbers.dtype == torch.bool:
        if tuple(numbers.shape) != (size,):
            raise InputError(
                f"{name!r} found a mask of shape {tuple(numbers.shape)}, expected ({size},)."
            )
        numbers = numbers.nonzero().reshape(-1)
    numbers = numbers.long().reshape(-1).unique()
    if not len(numbers) or int(numbers[0]) < 0 or int(numbers[-1]) >= size:
        raise InputError(
            f"{name!r} found no channels to keep, or others than 0 to {size - 1}; keep at"
            " least one."
        )
    return numbers
