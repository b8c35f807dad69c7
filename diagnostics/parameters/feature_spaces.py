"""Feature spaces of a model: the features that its tensors write and read, as
positions along their dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pathspace.capture.captured import Captured
from pathspace.inference.channels import Channels
from pathspace.inference.interpreter import interpret
from pathspace.inference.registry import facts_of
from pathspace.inference.sides import Side


@dataclass(frozen=True)
class FeatureSpace:
    """Features that several tensors share.

    Attributes:
        slices: (tensor, dimension) -> positions of the features along that dimension.
        readers: the (tensor, dimension) pairs along which a weight reads the features.
        mixed: whether the features are one channel, such as an attention head, with
            its own change of basis.
    """

    slices: Mapping[Side, np.ndarray]
    readers: frozenset[Side]
    mixed: bool = False


def feature_spaces(captured: Captured) -> tuple[FeatureSpace, ...]:
    """The spaces with a possible change of basis: all channels of the same tensors, and
    the features of each head.

    Args:
        captured: the capture.

    Returns:
        One space for all channels with one position each in the same tensors, and one for
        every channel with several positions (the features of a head, or of a stream that
        is normalised as a whole).
    """
    with torch.device("cpu"), torch.inference_mode(False):
        found, _ = interpret(captured, Channels)
        sides, _ = found.solve()
    members: dict[int, dict[Side, list[int]]] = {}
    for side, numbers in sides.items():
        for position, channel in enumerate(numbers.tolist()):
            if channel:
                members.setdefault(channel, {}).setdefault(side, []).append(position)
    joined: dict[tuple[Side, ...], dict[Side, list[int]]] = {}
    alone: list[dict[Side, list[int]]] = []
    for slices in members.values():
        if max(map(len, slices.values())) > 1:
            alone.append(slices)
            continue
        together = joined.setdefault(tuple(slices), {side: [] for side in slices})
        for side, positions in slices.items():
            together[side] += positions
    return tuple(
        FeatureSpace(
            {side: np.array(positions) for side, positions in slices.items()},
            frozenset(found.reads),
            mixed,
        )
        for mixed, slices in (
            *((True, one) for one in alone),
            *((False, one) for one in joined.values()),
        )
    )


def added_vectors(captured: Captured) -> set[str]:
    """Parameters that are only added to activations.

    Args:
        captured: the capture.

    Returns:
        Their names; they are biases, even if named otherwise.
    """
    kinds = ("copy", "movement", "repetition", "part", "split")
    found = set()
    for node in captured.graph.graph.nodes:
        kind, name = (
            captured.sources.get(node.name, ("", "")) if node.op == "placeholder" else ("", "")
        )
        if kind != "parameter":
            continue
        reached, only = [node], bool(node.users)
        while reached and only:
            here = reached.pop()
            for user in here.users:
                facts = facts_of(user)
                if facts.kind in kinds:
                    reached.append(user)
                    continue
                place = (
                    user.args[facts.bias]
                    if facts.bias is not None and len(user.args) > facts.bias
                    else None
                )
                only &= facts.kind == "sum" or place is here or user.kwargs.get("bias") is here
        if only:
            found.add(captured.canonical.get(name, name))
    return found
