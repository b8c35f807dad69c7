"""Checks of the settings of optimizers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.errors import InputError, InputTypeError, UnsupportedError

# the lower end of settings that must not be 0
SMALLEST = sys.float_info.min


def expect_parameters(owner: str, params: object) -> list[Any]:
    """The parameters as a list; anything else, such as the model itself, is refused.

    Raises:
        InputTypeError: the argument is a module, a tensor, a string, or not iterable.
        InputError: it is empty.
    """
    if isinstance(params, nn.Module | Tensor | str) or not isinstance(params, Iterable):
        raise InputTypeError(
            f"{owner} found a {type(params).__name__} as its parameters, expected an iterable of"
            " parameters; pass model.parameters() or model.named_parameters()."
        )
    found = list(params)
    if not found:
        raise InputError(
            f"{owner} found no parameters, expected at least one; pass model.parameters() of a"
            " model that has some (an iterator can be read only once)."
        )
    return found


def number(owner: str, name: str, value: Any, low: float = 0.0, high: float = float("inf")) -> None:
    """Refuse a setting that is out of range.

    Args:
        owner: name of the optimizer.
        name: name of the setting.
        value: its value: a number or a one-element tensor.
        low: smallest allowed value.
        high: upper limit; only smaller values are allowed.

    Raises:
        InputError: the value is not a number, or out of range.
    """
    found = value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InputError(
                f"{owner} found {name} as a tensor of {value.numel()} elements, expected one"
                " element."
            )
        if torch.compiler.is_compiling() or value.is_meta:
            return
        found = value.item()
    if not isinstance(found, Real) or isinstance(found, bool) or not low <= float(found) < high:
        above = f"of at least {low:g}" if low != SMALLEST else "above 0"
        bound = above if high == float("inf") else f"{above} and below {high:g}"
        raise InputError(f"{owner} found {name}={value!r}, expected a number {bound}.")


def switch(owner: str, name: str, value: object) -> None:
    """Refuse a setting that is neither true nor false.

    Raises:
        InputTypeError: it is something else.
    """
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise InputTypeError(f"{owner} found {name}={value!r}, expected True or False.")


def expect_state(owner: str, state: object) -> None:
    """Refuse what has not the form of an optimizer's state dict.

    Raises:
        InputError: ``state`` or ``param_groups`` is missing, or of another kind.
    """
    found = state if isinstance(state, Mapping) else {}
    groups = found.get("param_groups")
    if not isinstance(found.get("state"), Mapping) or not (
        isinstance(groups, list)
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
    ):
        raise InputError(
            f"{owner} found a {type(state).__name__} that is not the state dict of an optimizer,"
            " expected what optimizer.state_dict() returned; load another checkpoint."
        )


def pair(owner: str, name: str, value: Any) -> None:
    """Refuse a value that is not a pair of numbers of at least 0 and below 1.

    Raises:
        InputError: the value is not such a pair.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InputError(f"{owner} found {name}={value!r}, expected two numbers.")
    for one in value:
        number(owner, name, one, high=1.0)


def check_bound(owner: str, max_multiplier: float | None, relative: bool) -> None:
    """Refuse bounds that are not positive, and bounds for relative steps.

    Raises:
        InputError: the bound is not valid.
    """
    if max_multiplier is not None:
        number(owner, "max_multiplier", max_multiplier, low=SMALLEST)
        if relative:
            raise InputError(
                f"{owner} found max_multiplier={max_multiplier:g} with relative=True, whose steps"
                " have no multipliers; leave one out."
            )


def check_group(owner: str, group: dict[str, Any]) -> None:
    """Refuse settings of a group that are out of range.

    Raises:
        InputError: a setting is out of range.
        InputTypeError: a switch is neither true nor false.
    """
    for name in ("maximize", "nesterov", "amsgrad"):
        if name in group:
            switch(owner, name, group[name])
    for name in ("lr", "momentum", "weight_decay", "eps"):
        if name in group:
            number(owner, name, group[name])
    if "betas" in group:
        pair(owner, "betas", group["betas"])


def modes(owner: str, fused: bool | None, differentiable: bool) -> None:
    """Refuse modes of torch's optimizers that are not supported.

    Args:
        owner: name of the optimizer.
        fused: the user's argument.
        differentiable: the user's argument.

    Raises:
        UnsupportedError: one of them is true.
    """
    if fused:
        raise UnsupportedError(
            f"{owner} found fused=True, expected False: its kernels are chosen for the device;"
            " leave fused out."
        )
    if differentiable:
        raise UnsupportedError(
            f"{owner} found differentiable=True, expected False: the step writes into the weights"
            " in place; differentiate through a functional step of your own instead."
        )
