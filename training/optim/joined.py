"""Several optimizers as one: groups, steps and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from pathspace.errors import InputError, InputTypeError

from .settings import expect_state
from .state_order import expect_order


class Joined(Optimizer):
    """Several optimizers of one model as a single optimizer, with their groups and states.

    Schedulers may change the settings that all of the optimizers have:
    :attr:`defaults` holds no others.

    Args:
        optimizer: one optimizer of torch's kind, or several.

    Raises:
        InputTypeError: an argument is not an optimizer.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> both = Joined(
        ...     [torch.optim.Muon([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.01)]
        ... )
        >>> [group["lr"] for group in both.param_groups]
        [0.1, 0.01]
    """

    def __init__(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
        if not self.optimizers or not all(isinstance(one, Optimizer) for one in self.optimizers):
            raise InputTypeError(
                f"{type(self).__name__} found an optimizer of type {type(optimizer).__name__},"
                " expected one of torch.optim, or a list of several."
            )
        once = [
            id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]
        ]
        if len(set(once)) < len(once):
            raise InputError(
                f"{type(self).__name__} found a parameter in two of its optimizers, expected each"
                " in one; give every optimizer parameters of its own."
            )
        # a scheduler that finds a setting here, such as betas, changes it in every group:
        # all of them must have it
        first, *others = (one.defaults for one in self.optimizers)
        shared = {
            key: value for key, value in first.items() if all(key in other for other in others)
        }
        super().__init__(self.param_groups, shared)
        self._made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizers (the same objects)."""
        if len(self.optimizers) == 1:
            result: list[dict[str, Any]] = self.optimizers[0].param_groups
            return result
        return list(chain.from_iterable(one.param_groups for one in self.optimizers))

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """No effect; torch's constructor assigns groups."""

    @property
    def state(self) -> Any:
        """The state of the inner optimizer (the same object), or of several together."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].state
        return {key: value for one in self.optimizers for key, value in one.state.items()}

    @state.setter
    def state(self, state: Any) -> None:
        """No effect; torch's constructor assigns a state."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        """Refused: new groups belong to one of the optimizers.

        Raises:
            InputError: always after construction.
        """
        # (torch's constructor adds the groups, too)
        if "_made" in self.__dict__:
            raise InputError(
                f"{type(self).__name__} found a parameter group after it was made, expected all of"
                " them before; add it to one of its optimizers."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each inner optimizer; returns the loss of the closure."""
        return self._inner_steps(closure)

    def _inner_steps(self, closure: Callable[[], Any] | None) -> Any:
        if len(self.optimizers) == 1:
            return (
                self.optimizers[0].step() if closure is None else self.optimizers[0].step(closure)
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            one.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """All states as one state dict."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._state()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Raises:
            InputError: the state belongs to other optimizers.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        expect_state(type(self).__name__, state_dict)
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _state(self) -> dict[str, Any]:
        return join_states([one.state_dict() for one in self.optimizers])

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        expect_order(type(self).__name__, state_dict, self.param_groups)
        for one, part in zip(
            self.optimizers, split_state(state_dict, self.optimizers), strict=True
        ):
            one.load_state_dict(part)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without hooks and without the step that a
        scheduler has put in its place.
        """
        return {
            key: value
            for key, value in self.__dict__.items()
            if "hook" not in key and key != "step"
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        self.__dict__.update(state)
        self._patch_step_function()
        super().__setstate__({})


def join_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state dict from several, with all groups and consecutive numbers of parameters.

    Example:
        >>> one = {"state": {0: "a"}, "param_groups": [{"lr": 1.0, "params": [0]}]}
        >>> (
        ...     join_states([one, one])["state"],
        ...     [group["params"] for group in join_states([one, one])["param_groups"]],
        ... )
        ({0: 'a', 1: 'a'}, [[0], [1]])
    """
    if len(states) == 1:
        return dict(states[0])
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    first, own = 0, ("state", "param_groups")
    # such as the number of steps of PathSGD
    more = [{key: value for key, value in state.items() if key not in own} for state in states]
    if any(more):
        joined["more"] = more
    for state in states:
        joined["state"] |= {first + key: value for key, value in state["state"].items()}
        joined["param_groups"] += [
            {**group, "params": [first + number for number in group["params"]]}
            for group in state["param_groups"]
        ]
        first += sum(len(group["params"]) for group in state["param_groups"])
    return joined


def split_state(state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The reverse of :func:`join_states`.

    Args:
        state: a joined state.
        optimizers: the optimizers, whose groups :func:`expect_order` has found in the state.

    Raises:
        InputError: the state is that of another number of optimizers.
    """
    if len(optimizers) == 1:
        return [dict(state)]
    groups = list(state["param_groups"])
    parts, first, place = [], 0, 0
    rest = state.get("more", [{}] * len(optimizers))
    if not isinstance(rest, list) or len(rest) != len(optimizers):
        raise InputError(
            f"Joined found a state of other optimizers, expected one of {len(optimizers)}; load"
            " another checkpoint."
        )
    for one, more in zip(optimizers, rest, strict=True):
        mine, count = groups[place : place + len(one.param_groups)], 0
        place += len(mine)
        count = sum(len(group["params"]) for group in mine)
        numbers = range(first, first + count)
        parts.append(
            {
                **more,
                "state": {
                    key - first: value for key, value in state["state"].items() if key in numbers
                },
                "param_groups": [
                    {**group, "params": [number - first for number in group["params"]]}
                    for group in mine
                ],
            }
        )
        first += count
    return parts


__all__ = ["Joined", "join_states", "split_state"]
