"""What is kept of an optimizer on path values: state dicts, copies and pickles, tied to the two trees."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
from torch.optim import Optimizer

from pathspace import InputError, Skeleton
from training.optim.sharding import Whole

EXTRA = ("factor", "value", "tree", "counts")


class Remembered(Optimizer):
    """An optimizer whose state belongs to a skeleton.

    Vectors kept by unit are attributes, ``_`` and a name out of ``_extra``.
    """

    skeleton: Skeleton
    min_ratio: float
    _shards: Whole
    _blocks: list[int | None]
    _seen: list[tuple[int, int, tuple[int, ...]]]

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
        state = super().state_dict()
        state["path_space"] = {"fingerprint": self.fingerprint(), "optimizer": type(self).__name__}
        state["path_space"]["shard"] = [self._shards.rank, self._shards.world]
        state["path_space"] |= {name: getattr(self, f"_{name}").clone() for name in self._extra}
        return state

    _extra: tuple[str, ...] = EXTRA

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made with the same skeleton; weights may be loaded before or after.

        Raises:
            InputError: the state belongs to another optimizer, another skeleton or other shards.
        """
        extra = state_dict.get("path_space")
        here = [self._shards.rank, self._shards.world]
        if extra is not None and extra.get("shard", here) != here:
            raise InputError(
                f"{type(self).__name__} found a state saved by device {extra['shard'][0]} of {extra['shard'][1]}, "
                f"expected that of device {here[0]} of {here[1]}; each device keeps and loads the state of its own "
                "shards."
            )
        if (
            extra is None
            or extra["fingerprint"] != self.fingerprint()
            or extra["optimizer"] != type(self).__name__
            or any(extra[name].shape != getattr(self, f"_{name}").shape for name in self._extra)
        ):
            raise InputError(
                f"{type(self).__name__} found a state dict of another optimizer or skeleton, expected one saved with "
                "these two trees; rebuild the skeleton with the rule and seed it was trained with."
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "path_space"})
        for name in self._extra:
            getattr(self, f"_{name}").copy_(extra[name])
        # the next step compares the weights with the state, whichever of them was loaded last
        self._seen = [(pointer, -1, strides) for pointer, _, strides in self._seen]

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
