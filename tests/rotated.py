"""Changes of basis, measured: how far the outputs of a model move."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from compositions import distance
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pathspace as ps
from pathspace.evidence.bench import in_double
from pathspace.models.running import cast
from pathspace.models.stand_in import stand_in
from pathspace.rotations.space import FeatureSpaces

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@torch.no_grad()
def outputs(model: nn.Module, inputs: Inputs) -> Tensor:
    """All outputs as one vector, after the same random numbers."""
    torch.manual_seed(5)
    leaves = pytree.tree_leaves(model(*inputs[0], **inputs[1]))
    some = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.cat([leaf.double().reshape(-1) for leaf in some])


def in_turn(model: nn.Module, inputs: Inputs, found: FeatureSpaces) -> dict[str, float]:
    """Space -> how far a random element of its group moves the outputs, in float64."""
    bench, inputs = in_double(stand_in(model, share_tensors=False)), cast(inputs, torch.float64)
    before = outputs(deepcopy(bench), inputs)
    return {
        space.name: distance(
            before, outputs(ps.rotate_(deepcopy(bench), found, {space.name: "random"}), inputs)
        )
        for space in found.free
    }
