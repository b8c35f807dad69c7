"""The balanced network: of all networks in the gauge orbit the one with the smallest norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError, expect_arguments, expect_numbers
from ..graph.structure import Structure
from ..models.copies import safe_deepcopy
from ..shown import Shown
from .attained import attained
from .pairs import Pairs
from .programme import minimise
from .rescale import expect_blocks, rescale_

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Balancing(Shown):
    """The balanced gauge of a model, and the units that have none.

    Attributes:
        phi: log-scales that lead to the balanced network, ``(H,)``.
        before: ``sum |w|^p`` over path space, for the given model.
        after: the same at the minimum.
        imbalance: the certificate of the minimum: largest difference between entering and leaving
            weights of a unit, relative to the sum of both. The programme is convex, so 0 means
            that no smaller sum exists.
        left_alone: why units keep their scale: sentence -> ids of units. The minimum is
            that over all other units.
        steps: steps of Newton's method.
    """

    phi: Tensor
    before: float
    after: float
    imbalance: float
    left_alone: Mapping[str, np.ndarray]
    steps: int

    @property
    def kept(self) -> np.ndarray:
        """Ids of all units that keep their scale, in order."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *self.left_alone.values()]))

    def __str__(self) -> str:
        lines = [
            f"sum |w|^p {self.before:.6g} -> {self.after:.6g}, sides differ by {self.imbalance:.0e}"
        ]
        lines += [
            f"{len(units):,} of {len(self.phi):,} units left alone: {why}"
            for why, units in self.left_alone.items()
        ]
        return "\n".join(lines)


def balancing(
    model: nn.Module, graph: Structure, p: float = 2, tolerance: float = 1e-12
) -> Balancing:
    """Find the minimum of ``sum_e |w_e|^p`` over the gauge orbit, without changing the model.

    ``sum_e |w_e|^p exp(p (phi(head e) - phi(tail e)))`` is convex in ``phi`` (a geometric
    programme), also where scales are opposites or sums of others. A unit without a minimum keeps
    its scale, for example a unit before a normalisation; all others reach the minimum.

    Args:
        model: the model whose parameters ``graph`` holds, or a copy of it.
        graph: its reduction graph.
        p: which norm.
        tolerance: largest relative difference of the two sides.

    Raises:
        InputError: ``p`` is not positive, the model was never traced or lacks a parameter, weights
            are not finite, or the norms differ by more than ``tolerance`` after 500 steps.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU()
        ... )
        >>> graph = ps.trace(model, torch.randn(4, 2))
        >>> found = ps.balancing(model, graph)
        >>> [(len(units), why) for why, units in found.left_alone.items()]
        [(3, 'no weight leaves it (a normalisation follows): the smaller, the better')]
    """
    expect_arguments("balancing", model=model, graph=graph)
    expect_numbers("balance_", "a positive number", p=p, tolerance=tolerance)
    pairs = Pairs(graph, p, expect_blocks("balance_", model, graph))
    start = np.zeros(graph.num_units)
    before = pairs.sides(start)[2]
    if not np.isfinite(before):
        raise InputError(
            f"balance_ found a sum |w|^{p:g} of {before}, expected a finite one; load weights from"
            " before they diverged."
        )
    found = attained(pairs)
    best = minimise(pairs, found.free, start, tolerance)
    return Balancing(
        torch.from_numpy(best.phi), before, best.value, best.imbalance, found.reasons, best.steps
    )


def balance_(
    model: M,
    graph: Structure,
    p: float = 2,
    tolerance: float = 1e-12,
    optimizer: Optimizer | None = None,
) -> M:
    """Rescale a model in place so that incoming and outgoing weights of
    every unit have equal norms.

    ``sum_in |w|^p = sum_out |w|^p`` is where the convex function ``sum_e |w_e|^p exp(p
    (phi(head) - phi(tail)))`` has its minimum: of all networks in the orbit the one with
    the smallest ``L_p`` norm.

    Units without a minimum keep their scale: those that no weight leaves (a normalisation follows)
    or enters. :func:`balancing` lists them with the reason. Units that are free only at ``eps = 0``
    change too if another weight leaves them. Arguments and errors are those of :func:`balancing`;
    for ``optimizer`` see :func:`pathspace.rescale_`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... ).double()
        >>> graph = ps.trace(model, torch.randn(1, 2).double())
        >>> balanced = ps.balance_(model, graph)
        >>> incoming = balanced[0].weight.square().sum(1) + balanced[0].bias.square()
        >>> bool(torch.allclose(incoming, balanced[2].weight.square()[0]))
        True
    """
    expect_arguments("balance_", model=model, graph=graph)
    expect_arguments("balance_", or_none=True, optimizer=optimizer)
    return rescale_(model, graph, balancing(model, graph, p, tolerance).phi, optimizer)


@torch.no_grad()
def canonical_copy(model: M, graph: Structure) -> M:
    """A copy of a model at the canonical point of its orbit, in double precision."""
    copy = safe_deepcopy(model).double()
    phi = canonical_scales(graph, parameters=dict(copy.named_parameters(remove_duplicate=False)))
    return rescale_(copy, graph, torch.from_numpy(phi))


def canonical_scales(
    graph: Structure, parameters: Mapping[str, nn.Parameter] | None = None
) -> np.ndarray:
    """Log-scales that map every network of an orbit to the same network, ``(H,)``.

    That is the balanced network where all units can be balanced. Elsewhere ``sum_e |w_e|^2 - log
    |w_e|^2`` over pairs of units with a weight other than 0 is minimised, which has one minimum.
    """
    pairs = Pairs(graph, 2.0, parameters)
    found = attained(pairs)
    entering, leaving = pairs.counts()
    every = np.ones(graph.num_units, bool)
    tilt = np.zeros(graph.num_units) if found.free.all() else entering - leaving
    return minimise(pairs, every, tilt, 1e-10).phi
