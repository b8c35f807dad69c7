"""A trained network with its inputs and its graph, and how far outputs of copies are apart."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pathspace as ps
from zoo.trained import load


class Subject:
    """A trained network, its inputs, and its graph, traced once.

    Args:
        name: which one.
        dtype: its precision.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        model, args, kwargs = load(name)
        self.name, self.model = name, model.to(dtype)
        self.args, self.kwargs = pytree.tree_map(lambda leaf: cast(leaf, dtype), (args, kwargs))
        self.graph = ps.trace(self.model, *self.args, kwargs=self.kwargs)

    def copy(self) -> nn.Module:
        """A copy of the model to be changed."""
        return copy.deepcopy(self.model)

    def outputs(self, model: nn.Module, scale: float = 1.0) -> Tensor:
        """All outputs in one vector, where all inputs of real numbers are multiplied by `scale`."""
        args, kwargs = pytree.tree_map(
            lambda leaf: (
                leaf * scale if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            ),
            (self.args, self.kwargs),
        )
        return flat(model(*args, **kwargs))

    def moved(self, seed: int, spread: float = 1.0, exact: bool = True) -> nn.Module:
        """A copy that is rescaled by a normal log-scale for each unit; units that
        are free only at `eps = 0` stay, unless `exact` is false.
        """
        generator = torch.Generator().manual_seed(seed)
        phi = torch.randn(self.graph.num_units, generator=generator, dtype=torch.float64) * spread
        return ps.rescale_(self.copy(), self.graph, self.graph.exact_part(phi) if exact else phi)


def cast(leaf: Any, dtype: torch.dtype) -> Any:
    """Real numbers in another precision."""
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def flat(outputs: Any) -> Tensor:
    """All real numbers among the outputs in one vector."""
    values = dict(outputs) if hasattr(outputs, "items") else outputs
    leaves = [
        leaf
        for leaf in pytree.tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def change(before: Tensor, after: Tensor) -> float:
    """Largest change, relative to the largest entry; infinite where a number is lost."""
    difference = (before.double() - after.double()).abs().max()
    return (
        float(difference / before.double().abs().max()) if bool(difference.isfinite()) else math.inf
    )
