"""What is kept of an optimizer on path values: state dicts, copies and pickles, tied to the two trees."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
from torch.optim import Optimizer

from pathspace import InputError, Skeleton
from pathspace.training.optim.layout import Layout
from pathspace.training.optim.sharding import Whole

EXTRA = ("factor", "value", "least", "tree", "counts")


class Remembered(Optimizer):
    """An optimizer whose state belongs to a skeleton.

    Vectors kept by unit are attributes, ``_`` and a name out of ``_extra``.
    """

    skeleton: Skeleton
    min_ratio: float
    _shards: Whole
    _blocks: list[int | None]
    _seen: list[tuple[int, int, tuple[int, ...]]]
    _layout: Layout
    _stale: bool

    def _connect(self) -> None:
        """Lay out index vectors and recompute everything that follows from the weights."""

    def fingerprint(self) -> str:
        """A hash of the two trees, kept with the state so that a state of another skeleton is refused."""
        digest = hashlib.sha256()
        for tree in (self.skeleton.tree_in, self.skeleton.tree_out):
            for array in (tree.block, tree.index, tree.forward, tree.parent):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, with what is kept by unit and the skeleton's fingerprint."""
        # before the hooks of others, so that they see it
        handle = self.register_state_dict_post_hook(_described, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    _extra: tuple[str, ...] = EXTRA

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made with the same skeleton; weights may be loaded before or after.

        Raises:
            InputError: the state belongs to another optimizer, another skeleton or other shards.
        """
        found: list[dict[str, Any]] = []
        # after the hooks of others, which may change the state
        handle = self.register_load_state_dict_pre_hook(lambda _, state: found.append(self._checked(state)))
        try:
            if not isinstance(state_dict, dict):
                raise InputError(
                    f"{type(self).__name__} found a state of type {type(state_dict).__name__}, expected the dict of "
                    "optimizer.state_dict()."
                )
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        extra = found[0]
        self._stale = extra["order"] != self._order()
        for name in self._extra:
            if name != "factor" or not self._stale:
                getattr(self, f"_{name}").copy_(extra[name])
        # the next step compares the weights with the state, whichever of them was loaded last
        self._seen = [(pointer, -1, strides) for pointer, _, strides in self._seen]

    def _checked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What a state holds of path space, if it belongs here."""
        extra, owner = state_dict.get("path_space"), type(self).__name__
        here = [self._shards.rank, self._shards.world]
        if isinstance(extra, dict) and extra.get("shard", here) != here:
            raise InputError(
                f"{owner} found a state saved by device {extra['shard'][0]} of {extra['shard'][1]}, "
                f"expected that of device {here[0]} of {here[1]}; each device keeps and loads the state of its own "
                "shards."
            )
        if not {"state", "param_groups"} <= set(state_dict):
            extra = None
        if (
            not isinstance(extra, dict)
            or extra.get("fingerprint") != self.fingerprint()
            or extra.get("optimizer") != owner
        ):
            raise InputError(
                f"{owner} found a state dict of another optimizer or skeleton, expected one saved with "
                "these two trees; rebuild the skeleton with the rule and seed it was trained with."
            )
        sizes = {name: getattr(self, f"_{name}").shape for name in self._extra}
        if extra.get("order") != self._order():
            # by column as they lay in memory, which is another order now
            del sizes["factor"]
        for name, size in sizes.items():
            if getattr(extra.get(name), "shape", None) != size:
                raise InputError(
                    f"{owner} found a damaged state: path_space[{name!r}] is no tensor of shape {tuple(size)}, "
                    "expected what optimizer.state_dict() returned; load another checkpoint."
                )
        return extra

    def _order(self) -> list[list[int] | None]:
        """How the dimensions of every tensor lie in memory."""
        return [None if part.order is None else list(part.order) for part in self._layout.parts]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: everything but the traced model."""
        graph = dataclasses.replace(self.skeleton.graph, captured=None, parameters={})  # type: ignore[arg-type]
        kept = {name: getattr(self, f"_{name}") for name in self._extra}
        return {
            **super().__getstate__(),
            "skeleton": dataclasses.replace(self.skeleton, graph=graph),
            "min_ratio": self.min_ratio,
            "_blocks": self._blocks,
            "_kept": kept,
            **self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back from a copy or a pickle."""
        kept = state.pop("_kept", None)
        super().__setstate__(state)
        if kept is None:
            return
        self._patch_step_function()
        self._connect()
        for name, value in kept.items():
            getattr(self, f"_{name}").copy_(value)


def _described(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Add what an optimizer keeps of path space to its state."""
    assert isinstance(optimizer, Remembered)
    state["path_space"] = {
        "fingerprint": optimizer.fingerprint(),
        "optimizer": type(optimizer).__name__,
        "shard": [optimizer._shards.rank, optimizer._shards.world],
        "order": optimizer._order(),
        **{name: getattr(optimizer, f"_{name}").clone() for name in optimizer._extra},
    }
