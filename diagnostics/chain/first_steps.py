"""Directions of branches that start at zero, after the first small steps of gradient descent.

A branch with a zero last layer (``zero_init_residual``) has no direction. Its first direction
is ``-eta dz/dW (dz/dW)^T dLoss/dz``, summed over the samples; its cosine does not depend on
``eta`` if ``eta`` is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.models.copies import safe_deepcopy
from pathspace.shown import Shown

from ..parameters.gradients import batch_gradient
from .chain import MarkovChain
from .efficiency import ChainRecord, observe
from .penalty_disabled import penalty_disabled

# a zero head moves one step before the layers below it; a branch with two zero layers never moves
MOST_STEPS = 3
RELATIVE_STEP = 1e-3


@dataclass(frozen=True)
class FirstSteps(Shown):
    """Directions, after the first steps, of branches that have none at the start.

    Attributes:
        steps: number of steps until no further branch began to move.
        cosines: name of the node -> mean cosine with descent after these steps; NaN if
            it still has no direction.
    """

    steps: int
    cosines: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The results as plain values, without nodes that still have no direction."""
        known = {name: value for name, value in self.cosines.items() if not math.isnan(value)}
        return {"first_steps": self.steps, "first_cosines": known}


def first_steps(
    chain: MarkovChain,
    record: ChainRecord,
    loss: Callable[[Any, Any], Tensor],
    batches: Sequence[tuple[Any, Any]],
) -> FirstSteps | None:
    """Follow the branches without a direction through the first steps of gradient
    descent, on a copy of the model.

    Args:
        chain: the traced chain.
        record: the unchanged chain on these batches.
        loss: ``loss(outputs, targets)``.
        batches: inputs and targets; each step uses all of them.

    Returns:
        The directions; ``None`` if every branch has one, or no step is possible.

    Example:
        >>> model = nn.TransformerEncoderLayer(
        ...     8, 2, 16, batch_first=True, norm_first=True, dropout=0.0
        ... )
        >>> _, _ = nn.init.zeros_(model.linear2.weight), nn.init.zeros_(model.linear2.bias)
        >>> x, y = torch.randn(4, 5, 8), torch.randn(4, 5, 8)
        >>> chain = MarkovChain.trace(model, x)
        >>> record = chain.observe(nn.functional.mse_loss, x, y)
        >>> found = first_steps(chain, record, nn.functional.mse_loss, [(x, y)])
        >>> found.steps, list(found.cosines)
        (1, ['linear2'])
    """
    lost = [i for i, known in enumerate(record.cosines.isfinite().any(1).tolist()) if not known]
    if not lost:
        return None
    model = safe_deepcopy(chain.model)
    moved = replace(chain, model=model)
    cosines, steps = torch.full((len(lost),), torch.nan, dtype=torch.float64), 0
    for step in range(1, MOST_STEPS + 1):
        if not _descend(model, loss, batches):
            break
        found = (
            ChainRecord.merge(observe(moved, loss, *batch) for batch in batches)
            .cosines[lost]
            .nanmean(1)
        )
        if int(found.isfinite().sum()) > int(cosines.isfinite().sum()):
            cosines, steps = found, step
    names = [chain.nodes[i].name for i in lost]
    return FirstSteps(steps, dict(zip(names, cosines.tolist(), strict=True))) if steps else None


def _descend(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batches: Sequence[tuple[Any, Any]]
) -> bool:
    """One step of a thousandth of the norm of all weights; false if there is no gradient."""
    weights = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in weights]
    for inputs, targets in batches:
        with penalty_disabled(model):
            found = batch_gradient(model, loss, inputs, targets, weights, summed=True)
        total = [t if g is None else t + g for t, g in zip(total, found, strict=True)]
    size = float(torch.stack([t.double().norm() for t in total]).norm())
    if not 0 < size < math.inf:
        return False
    length = float(torch.stack([p.detach().double().norm() for p in weights]).norm())
    with torch.no_grad():
        for p, t in zip(weights, total, strict=True):
            p.sub_(t, alpha=RELATIVE_STEP * length / size)
    return True
