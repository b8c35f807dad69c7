"""Checks of the settings and states of optimizers.

A state knows its parameters by their numbers alone, so that one loaded in another order would give
moments to the wrong weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from pathspace.errors import InputError, InputTypeError, UnsupportedError, expect_numbers
from pathspace.files.checkpoints import bare


@dataclass(frozen=True)
class Manner:
    """How a step depends on path values.

    Attributes:
        power: 2 for optimizers whose steps are linear in gradients, so that the learning rate of
            an edge is multiplied by ``1 / (pre_tail s_head)^2``; 1 for those that divide by the
            size of gradients.
        cap: upper bound of this multiplier, in the balanced gauge at the start.
        relative: whether steps are those of logarithms of path values, without multipliers.
        min_ratio: smallest absolute ratio of a path value to that at the start.
    """

    power: int = 2
    cap: float | None = None
    relative: bool = False
    min_ratio: float = 1e-12


def memoryless(optimizers: Sequence[Optimizer]) -> bool:
    """Whether steps are those of SGD without momentum, so that no state depends on coordinates."""
    return all(
        type(one) is SGD and not any(group["momentum"] for group in one.param_groups)
        for one in optimizers
    )


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


def expect_manner(
    owner: str, min_ratio: float, max_multiplier: float | None, relative: bool
) -> None:
    """Refuse limits of path values that are out of range, and bounds for relative steps.

    Raises:
        InputError: a limit is out of range, or there are two manners.
        InputTypeError: a limit is not a number, or ``relative`` neither true nor false.
    """
    expect_numbers(owner, "a number between 0 and 1", min_ratio=min_ratio)
    expect_numbers(owner, "a positive number", or_none=True, max_multiplier=max_multiplier)
    switch(owner, "relative", relative)
    if relative and max_multiplier is not None:
        raise InputError(
            f"{owner} found max_multiplier={max_multiplier:g} with relative=True, whose steps have"
            " no multipliers; leave one out."
        )


# what settings of optimizers have to be, in words of expect_numbers
_SETTINGS = {
    "a number of at least 0": ("lr", "momentum", "weight_decay", "eps"),
    "a number of at least 0 and below 1": ("betas",),
    "a number": ("dampening",),
}


def check_group(owner: str, group: Mapping[str, Any]) -> None:
    """Refuse settings of a group that are out of range, and steps through which gradients flow.

    Raises:
        InputError: a setting is out of range.
        InputTypeError: a setting is not a number, or a switch is neither true nor false.
        UnsupportedError: ``differentiable`` is true.
    """
    for name in ("maximize", "nesterov", "amsgrad"):
        if name in group:
            switch(owner, name, group[name])
    betas = group.get("betas", (0, 0))
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InputError(f"{owner} found betas={betas!r}, expected two numbers.")
    for expected, names in _SETTINGS.items():
        for name in set(names) & group.keys():
            # (Adafactor has two of the name "eps", of which one may be None)
            several = isinstance(group[name], tuple | list)
            for one in group[name] if several else (group[name],):
                # (rates may be tensors of one element)
                single = isinstance(one, Tensor) and one.numel() == 1
                shown = {name: one.item() if single else one}
                expect_numbers(owner, expected, or_none=several, **shown)
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise InputError(
            f"{owner} found nesterov=True, which needs momentum above 0 and dampening 0."
        )
    if group.get("differentiable"):
        raise UnsupportedError(
            f"{owner} found differentiable=True, expected False: the step writes into the weights"
            " in place; differentiate through a functional step of your own instead."
        )


def expect_order(owner: str, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a state of other groups, or of the same parameters in another order."""
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
    """Refuse a state with a tensor of another shape than its parameter (``None``: it may have any
    tensors).
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
