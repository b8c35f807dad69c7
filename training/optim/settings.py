"""Settings of optimizers, refused in one sentence where they make no sense."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pathspace import InputError, UnsupportedError


def number(owner: str, name: str, value: Any, low: float = 0.0, high: float = float("inf")) -> None:
    """Refuse a setting that is out of range.

    Args:
        owner: the class that is asking.
        name: the setting.
        value: what was found; tensors are not looked at.
        low: smallest value allowed.
        high: values below this are allowed.

    Raises:
        InputError: it is no number, or out of range.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InputError(f"{owner} found {name} as a tensor of {value.numel()} elements, expected one element.")
        return
    if not isinstance(value, int | float) or not low <= value < high:
        bound = f"at least {low:g}" if high == float("inf") else f"at least {low:g} and below {high:g}"
        raise InputError(f"{owner} found {name}={value!r}, expected a number of {bound}.")


def modes(owner: str, fused: bool | None, differentiable: bool) -> None:
    """Refuse the modes of torch's optimizers that make no sense here.

    Args:
        owner: the class that is asking.
        fused: as given by the user.
        differentiable: as given by the user.

    Raises:
        UnsupportedError: either was asked for.
    """
    if fused:
        raise UnsupportedError(
            f"{owner} found fused=True, expected False: its kernels are chosen for the device; leave fused out."
        )
    if differentiable:
        raise UnsupportedError(
            f"{owner} found differentiable=True, expected False: the step writes into the weights in place; "
            "differentiate through a functional step of your own instead."
        )
