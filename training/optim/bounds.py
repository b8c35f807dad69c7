r"""An upper bound on the multipliers of a step, in the balanced gauge.

A step multiplies the gradient of a weight ``u -> v`` by ``1 / (pre_u s_v)^2``. In the gauge in
which the network is balanced, ``pre`` becomes ``pre E`` and ``s`` becomes ``s / E``, and each end
is bounded by the root of the bound::

    1 / (pre_u E_u)^2 <= sqrt(cap)        1 / (s_v / E_v)^2 <= sqrt(cap)

A step changes neither ``s`` nor ``E``, so both bounds are constants. Steps with ``1 / scale``
instead of its square are bounded in the same way without the squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pathspace.graph.structure import Structure

from .canonical_gauge import canonical


def balancing_factors(graph: Structure, tensors: Mapping[str, Tensor]) -> Tensor:
    """``E``: the factor of every id from the current to the balanced gauge, 1 for the
    root, ``(H + 1 + derived,)``.

    Args:
        graph: the reduction graph.
        tensors: its unsharded parameters by name.
    """
    phi = canonical(graph, tensors).phi
    return torch.from_numpy(np.exp(np.concatenate([np.zeros(1), phi, graph.forms @ phi])))


def limited(factor: Tensor, balancing: Tensor, cap: float, linear: bool) -> Tensor:
    """Bounded factors of one end of edges.

    Args:
        factor: ``1 / pre`` of tails or ``1 / s`` of heads, to the power in the step.
        balancing: their divisor in the balanced gauge: ``E`` of tails, ``1 / E`` of heads.
        cap: the bound.
        linear: whether the step has ``1 / scale`` instead of its square.
    """
    most = limits(balancing, cap, linear)
    return factor.clamp(-most, most)


def limits(balancing: Tensor, cap: float, linear: bool) -> Tensor:
    """Upper bounds of the factors of one end of edges; arguments as for :func:`limited`."""
    size = balancing.abs() if linear else balancing.square()
    return size * math.sqrt(cap)


__all__ = ["balancing_factors", "limited", "limits"]
