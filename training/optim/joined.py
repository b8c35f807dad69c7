"""States of several optimizers as one, in the form torch gives to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from pathspace import InputError


def join_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state dict out of several: groups in a row, parameters counted on.

    Example:
        >>> one = {"state": {0: "a"}, "param_groups": [{"lr": 1.0, "params": [0]}]}
        >>> join_states([one, one])["state"], [group["params"] for group in join_states([one, one])["param_groups"]]
        ({0: 'a', 1: 'a'}, [[0], [1]])
    """
    if len(states) == 1:
        return dict(states[0])
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    first = 0
    for state in states:
        joined["state"] |= {first + key: value for key, value in state["state"].items()}
        joined["param_groups"] += [
            {**group, "params": [first + number for number in group["params"]]} for group in state["param_groups"]
        ]
        first += sum(len(group["params"]) for group in state["param_groups"])
    return joined


def split_state(state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The reverse of :func:`join_states`.

    Raises:
        InputError: the state has other groups.
    """
    groups = list(state.get("param_groups", ()))
    wanted = [len(group["params"]) for one in optimizers for group in one.param_groups]
    if [len(group["params"]) for group in groups] != wanted:
        raise InputError(
            f"The state has groups of {[len(group['params']) for group in groups]} parameters, expected {wanted}; load "
            "the state of the same optimizer."
        )
    parts, first, place = [], 0, 0
    for one in optimizers:
        mine, count = groups[place : place + len(one.param_groups)], 0
        place += len(mine)
        count = sum(len(group["params"]) for group in mine)
        numbers = range(first, first + count)
        parts.append(
            {
                "state": {key - first: value for key, value in state["state"].items() if key in numbers},
                "param_groups": [{**group, "params": [number - first for number in group["params"]]} for group in mine],
            }
        )
        first += count
    return parts


__all__ = ["join_states", "split_state"]
