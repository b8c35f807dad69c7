"""Saving, checking and loading of the state of an optimizer on path values, which
belongs to the two trees.

All values are in ``state``, as tensors that are equal on every device: vectors by chain and by
tail in the entry of the first tensor of path space, and for each tensor its weights on the
trees and its number of steps. So ``torch.distributed.checkpoint`` can save them, and any number
of devices can load them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathspace.errors import InputError
from pathspace.paths.skeleton import Skeleton

from .space import PathSpace
from .tree_state import digest, packed, unpacked

# names of vectors that are not stored with the first tensor
_APART = ("factor", "tree", "steps")


def fingerprint(skeleton: Skeleton) -> str:
    """A hash of the two trees."""
    trees_hash = hashlib.sha256()
    for tree in (skeleton.tree_in, skeleton.tree_out):
        for array in (tree.block, tree.index, tree.forward, tree.parent):
            trees_hash.update(np.ascontiguousarray(array).tobytes())
    return trees_hash.hexdigest()


def without_model(skeleton: Skeleton) -> Skeleton:
    """The skeleton without the traced model."""
    graph = dataclasses.replace(skeleton.graph, captured=None, parameters={})  # type: ignore[arg-type]
    return dataclasses.replace(skeleton, graph=graph)


def _owned(owner: str, skeleton: Skeleton) -> Tensor:
    """A hash of the trees and of the optimizer's class."""
    return digest(f"{owner} {fingerprint(skeleton)}")


def _by_chain(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: vector for name, vector in kept.items() if name not in _APART}


def publish(
    owner: str,
    space: PathSpace,
    kept: Mapping[str, Tensor],
    state: MutableMapping[Tensor, dict[str, Any]],
) -> None:
    """Add copies of all vectors of path space to the state of an optimizer.

    Args:
        owner: name of its class.
        space: its path space.
        kept: the rule's vectors, by name.
        state: the state of every parameter; it is changed.
    """
    record = space.record
    record.fill()
    given = [slot for slot in space.slots if slot.given]
    for number, slot in enumerate(given):
        own = record.tree[record.spans[slot.block]] if slot.block is not None else record.tree[:0]
        state[slot.parameter]["path_space"] = {"tree": own.clone()}
        if "steps" in kept:
            state[slot.parameter]["path_space"]["steps"] = kept["steps"][number].clone()
    # (loaders of sharded states read only states of trained parameters)
    first = min(given, key=lambda slot: (not slot.parameter.requires_grad, slot.block is None))
    state[first.parameter]["path_space"] |= {
        "fingerprint": _owned(owner, space.skeleton).to(space.device),
        **{name: tensor.to(space.device) for name, tensor in packed(space.skeleton).items()},
        "factor": record.factor.clone(),
        **{name: vector.clone() for name, vector in _by_chain(kept).items()},
    }


def trees(state: Any, skeleton: Skeleton) -> Skeleton | None:
    """The skeleton of a state, where its rule has chosen other trees than for the weights
    now; ``None`` otherwise.
    """
    entries = state.get("state") if isinstance(state, Mapping) else None
    some = (
        [entry.get("path_space") for entry in entries.values()]
        if isinstance(entries, Mapping)
        else []
    )
    inside = next(
        (entry for entry in some if isinstance(entry, Mapping) and "fingerprint" in entry), {}
    )
    found = unpacked(skeleton, inside)
    return None if found is None or fingerprint(found) == fingerprint(skeleton) else found


def checked(
    owner: str, state: dict[str, Any], space: PathSpace, kept: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """The entries of path space in a state, by parameter.

    Raises:
        InputError: the state belongs to another optimizer or another skeleton, or is damaged.
    """
    entries: Any = state.get("state")
    keys = [key for group in state.get("param_groups", ()) for key in group.get("params", ())]
    mine = (
        [entries.get(key, {}).get("path_space") for key in keys]
        if isinstance(entries, Mapping)
        else []
    )
    found = [entry if isinstance(entry, dict) else {} for entry in mine]
    inside = next((entry for entry in found if "fingerprint" in entry), {})
    mark = inside.get("fingerprint")
    if not isinstance(mark, Tensor) or not torch.equal(mark.cpu(), _owned(owner, space.skeleton)):
        raise InputError(
            f"{owner} found a state dict of another optimizer or skeleton, expected one saved with"
            " these two trees; rebuild the skeleton with the rule and seed it was trained with."
        )
    wanted = {"factor": space.record.factor, **_by_chain(kept)}
    pairs: list[tuple[str, Any, tuple[int, ...]]]
    pairs = [
        (f"path_space[{name!r}]", inside.get(name), tuple(vector.shape))
        for name, vector in wanted.items()
    ]
    spans = [
        space.record.spans[slot.block]
        for slot in space.slots
        if slot.given and slot.block is not None
    ]
    owned = [
        entry for entry, slot in zip(found, space.slots, strict=False) if slot.block is not None
    ]
    pairs += [
        ("tree", entry["tree"], (span.stop - span.start,))
        for entry, span in zip(owned, spans, strict=False)
        if "tree" in entry
    ]
    for name, value, shape in pairs:
        if getattr(value, "shape", None) != torch.Size(shape):
            raise InputError(
                f"{owner} found a damaged state: {name} is not a tensor of shape {shape}, expected"
                " what optimizer.state_dict() returned; load another checkpoint."
            )
    return found


def restore(found: list[dict[str, Any]], space: PathSpace, kept: Mapping[str, Tensor]) -> None:
    """Load the vectors of path space from a state; weights may be loaded before or after.

    Args:
        found: a result of :func:`checked`.
        space: the path space.
        kept: the rule's vectors, written in place.
    """
    record = space.record
    record.fill()
    inside = next(entry for entry in found if "fingerprint" in entry)
    record.factor.copy_(inside["factor"])
    for name, vector in _by_chain(kept).items():
        vector.copy_(inside[name])
    for number, (slot, entry) in enumerate(zip(space.slots, found, strict=False)):
        # (loaders of sharded states may omit frozen weights)
        if slot.block is not None and "tree" in entry:
            record.tree[record.spans[slot.block]] = entry["tree"].to(record.tree)
        if "steps" in kept and "steps" in entry:
            kept["steps"][number] = entry["steps"].to(kept["steps"])
    record.hand_out()
    # the next step compares the weights with the state, in whichever order they are loaded
    space.loaded = True


__all__ = ["checked", "fingerprint", "publish", "restore", "trees", "without_model"]
