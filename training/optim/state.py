"""What is kept of an optimizer on path values: states tied to the two trees, to be saved, checked and restored."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from pathspace import InputError, Skeleton
from pathspace.training.optim.space import PathSpace


def fingerprint(skeleton: Skeleton) -> str:
    """A hash of the two trees."""
    digest = hashlib.sha256()
    for tree in (skeleton.tree_in, skeleton.tree_out):
        for array in (tree.block, tree.index, tree.forward, tree.parent):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def without_model(skeleton: Skeleton) -> Skeleton:
    """The skeleton without the model it was traced from."""
    graph = dataclasses.replace(skeleton.graph, captured=None, parameters={})  # type: ignore[arg-type]
    return dataclasses.replace(skeleton, graph=graph)


def _order(space: PathSpace) -> list[list[int] | None]:
    """How the dimensions of every tensor lie in memory."""
    return [None if part.order is None else list(part.order) for part in space.layout.parts]


def described(owner: str, space: PathSpace, kept: Mapping[str, Tensor]) -> dict[str, Any]:
    """What an optimizer adds to its state.

    Args:
        owner: its class.
        space: its path space.
        kept: the vectors it keeps from step to step, by name.
    """
    return {
        "fingerprint": fingerprint(space.skeleton),
        "optimizer": owner,
        "shard": [space.shards.rank, space.shards.world],
        "order": _order(space),
        **{name: vector.clone() for name, vector in kept.items()},
    }


def checked(owner: str, state: dict[str, Any], space: PathSpace, kept: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a state holds of path space, if it belongs here.

    Raises:
        InputError: it belongs to another optimizer, another skeleton or other shards.
    """
    extra: Any = state.get("path_space")
    here = [space.shards.rank, space.shards.world]
    if isinstance(extra, dict) and extra.get("shard", here) != here:
        raise InputError(
            f"{owner} found a state saved by device {extra['shard'][0]} of {extra['shard'][1]}, expected that of "
            f"device {here[0]} of {here[1]}; each device keeps and loads the state of its own shards."
        )
    known = isinstance(extra, dict) and {"state", "param_groups"} <= set(state)
    if not known or (extra.get("fingerprint"), extra.get("optimizer")) != (fingerprint(space.skeleton), owner):
        raise InputError(
            f"{owner} found a state dict of another optimizer or skeleton, expected one saved with these two trees; "
            "rebuild the skeleton with the rule and seed it was trained with."
        )
    for name, vector in kept.items():
        # factors by tail as they lay in memory may be in another order now
        if name == "factor" and extra.get("order") != _order(space):
            continue
        if getattr(extra.get(name), "shape", None) != vector.shape:
            raise InputError(
                f"{owner} found a damaged state: path_space[{name!r}] is not a tensor of shape {tuple(vector.shape)}, "
                "expected what optimizer.state_dict() returned; load another checkpoint."
            )
    return extra  # type: ignore[no-any-return]


def restore(extra: Mapping[str, Any], space: PathSpace, kept: Mapping[str, Tensor]) -> None:
    """Take over what a state holds of path space; weights may be loaded before or after.

    Args:
        extra: what :func:`checked` returned.
        space: the path space.
        kept: the vectors, written in place.
    """
    space.stale = extra["order"] != _order(space)
    for name, vector in kept.items():
        if name != "factor" or not space.stale:
            vector.copy_(extra[name])
    # the next step compares the weights with the state, whichever of them was loaded last
    space.loaded = True


__all__ = ["checked", "described", "fingerprint", "restore", "without_model"]
