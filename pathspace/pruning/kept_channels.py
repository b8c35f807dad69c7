"""Which channels of a group to keep: a share of them by score, a boolean mask, or their numbers."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, InputTypeError


def scalar(value: Any) -> Any:
    """A tensor with one number and no dimension as that number; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def is_share(value: Any) -> bool:
    """Whether a value is a share of channels."""
    return isinstance(value, Real) and not isinstance(value, bool)


def share_of(keep: Any) -> float:
    """One share of channels for all groups.

    Raises:
        InputTypeError: it is not a number.
    """
    share = scalar(keep)
    if not is_share(share):
        raise InputTypeError(
            f"Channels to keep were given as {keep!r}, expected a share, or a dict from groups to"
            " shares, masks or numbers of channels."
        )
    return float(share)


def what_stays(owner: str, unnamed: tuple[Any, ...], keep: Any, remove: Any) -> Any:
    """What to keep: ``keep`` itself, the rest of ``remove``, or a half.

    Raises:
        InputError: ``remove`` is not a share below 1.
        InputTypeError: something has no name, or both are given.
    """
    if unnamed or (keep is not None and remove is not None):
        found = repr(unnamed[0]) + " without a name" if unnamed else f"both {keep=} and {remove=}"
        raise InputTypeError(
            f"{owner} found {found}, expected keep= for the channels that stay (keep=0.9) or"
            " remove= for the share that goes (remove=0.1); name one of them."
        )
    if remove is None:
        return 0.5 if keep is None else keep
    share = scalar(remove)
    if not is_share(share) or not 0 <= share < 1:
        raise InputError(
            f"{owner} found {remove=}, expected a share of channels from 0 to below 1; keep= takes"
            " numbers of channels by group."
        )
    return 1 - float(share)


def whole_numbers(name: str, value: Any) -> Tensor:
    """Numbers of channels, or a boolean mask, as a tensor.

    Raises:
        InputTypeError: it is neither.
    """
    try:
        numbers: Tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.zeros(1)
    if numbers.numel() and (numbers.is_floating_point() or numbers.is_complex()):
        raise InputTypeError(
            f"{name!r} found {value!r}, expected a share of channels, a boolean mask, or the"
            " numbers of channels."
        )
    return numbers


def kept_numbers(name: str, size: int, value: Any, scores: Tensor | None) -> Tensor:
    """The channels to keep, ascending.

    Args:
        name: of their group, for messages.
        size: number of channels of the group.
        value: a share, a mask or numbers.
        scores: importance of each channel, for a share.

    Raises:
        InputError: no channel would be left, or there are no such channels.
        InputTypeError: the value is none of these.
    """
    if is_share(value):
        share = float(value)
        if not 0 < share <= 1:
            raise InputError(
                f"{name!r} found keep={share!r}, expected a share of channels above 0 and up to 1."
            )
        assert scores is not None
        return scores.topk(max(1, math.ceil(share * size - 1e-9))).indices.sort().values
    numbers: Tensor = whole_numbers(name, value)
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
