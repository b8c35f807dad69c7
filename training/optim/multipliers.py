r"""Multipliers of the learning rate in a step on path values, known before the first step.

A step of G-SGD changes a weight ``u -> v`` by ``lr / |p_u p_v|`` times its gradient in the
gauge with ``|pre_v| = |s_v|``, and the logarithm of a chain's path value by ``lr / p_k^2``
times its derivative. Both factors are invariant under rescaling. With products of many small
weights they reach ``1e13``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pathspace import Skeleton
from pathspace.log_prefix import log_prefixes, log_suffixes

# above this, the largest step overflows at learning rates that suit most weights
LARGE = 1e4
BAR = 40


@dataclass(frozen=True)
class Multipliers:
    """The distribution of the multipliers of a skeleton.

    Attributes:
        decades: power of ten -> number of scalars and chains with a multiplier
            between it and the next power.
        median: their median.
        largest: the largest.
    """

    decades: dict[int, int]
    median: float
    largest: float

    def __str__(self) -> str:
        most = max(self.decades.values(), default=1)
        lines = [
            f"  1e{decade:+03d}  {'#' * max(1, round(BAR * count / most)):{BAR}}  {count:,}"
            for decade, count in sorted(self.decades.items())
        ]
        return "\n".join(lines)


def multipliers(skeleton: Skeleton) -> Multipliers:
    """Multipliers of all edges outside the trees and of all chains.

    Args:
        skeleton: the skeleton; the current weights are used.

    Returns:
        Their distribution; the median is exact to a tenth of a decade.

    Raises:
        InputError: a skeleton weight is 0.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.training import init_skeleton
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> skeleton = ps.trace(model, torch.randn(1, 2)).skeleton()
        >>> init_skeleton(model, skeleton)
        >>> multipliers(skeleton).largest
        1.0
    """
    skeleton = skeleton.live
    graph = skeleton.graph
    logs = torch.from_numpy((log_prefixes(skeleton) + log_suffixes(skeleton)) / np.log(10.0))
    fine: dict[int, int] = {}
    largest = -np.inf

    def count(powers: np.ndarray, times: int) -> None:
        nonlocal largest
        if powers.size:
            # rounding errors of sums of logarithms must not move a 1 to the decade below
            tenths, numbers = np.unique(
                np.floor(10 * powers + 1e-6).astype(np.int64), return_counts=True
            )
            for tenth, number in zip(tenths.tolist(), numbers.tolist(), strict=True):
                fine[tenth] = fine.get(tenth, 0) + times * number
            largest = max(largest, float(powers.max()))

    for block in graph.blocks:
        ends = [logs[ids.abs()] * ids.sign() for ids in (block.tail, block.head)]
        power = -(ends[0] + ends[1])
        count(power.reshape(-1).numpy(), max(1, block.numel // power.numel()))
    count(-2 * logs[1 : graph.num_units + 1].numpy(), 1)
    order = sorted(fine)
    total = np.cumsum([fine[tenth] for tenth in order])
    decades: dict[int, int] = {}
    for tenth in order:
        decades[tenth // 10] = decades.get(tenth // 10, 0) + fine[tenth]
    if not order:
        return Multipliers({}, 1.0, 1.0)
    median = order[int(np.searchsorted(total, total[-1] / 2))] / 10
    return Multipliers(decades, _power(median), _power(largest))


def _power(exponent: float) -> float:
    return float(10.0 ** min(max(exponent, -300.0), 300.0))


def warn_of_multipliers(
    owner: str, skeleton: Skeleton, given: Mapping[str, Tensor], bound: float | None
) -> None:
    """Warn if an ordinary learning rate would overflow.

    Args:
        owner: name of the optimizer.
        skeleton: its skeleton, perhaps of another copy of the model.
        given: name -> parameter of the optimizer.
        bound: its bound on the multipliers, or ``None``.
    """
    if bound is not None:
        return
    known = skeleton.graph.parameters
    graph = replace(skeleton.graph, parameters={**known, **given})  # type: ignore[dict-item]
    found = multipliers(replace(skeleton, graph=graph))
    if found.largest > LARGE:
        other = "" if skeleton.rule == "magnitude" else "take rule='magnitude', "
        warnings.warn(
            f"{owner} multiplies the learning rate by {found.median:.0e} at the median and"
            f" {found.largest:.0e} at most (rule {skeleton.rule!r}), so that rates which train most"
            " weights make others overflow: pass max_multiplier=1.0 or relative=True, start from"
            f" init_skeleton(model, skeleton), {other}or see pathspace.training.suggest(model,"
            " graph).",
            stacklevel=4,
        )


def warn_of_zeros(
    owner: str,
    skeleton: Skeleton,  # noqa: ARG001  (called like warn_of_multipliers)
    given: Mapping[str, Tensor],
    bound: float | None,  # noqa: ARG001
) -> None:
    """Warn about trained weights of value 0, which relative steps do not change.

    Args:
        owner: name of the optimizer.
        skeleton: its skeleton.
        given: name -> parameter of the optimizer.
        bound: not used.
    """
    trained = {name: p for name, p in given.items() if p.requires_grad}
    zeros = {name: int((p.detach() == 0).sum()) for name, p in trained.items()}
    if any(zeros.values()):
        first = next(name for name, count in zeros.items() if count)
        warnings.warn(
            f"{owner} found {sum(zeros.values()):,} of {sum(p.numel() for p in trained.values()):,}"
            f" weights at 0 (first: {first!r}), which relative steps leave there: set them to small"
            " numbers, or leave relative out.",
            stacklevel=4,
        )


__all__ = ["Multipliers", "multipliers", "warn_of_multipliers", "warn_of_zeros"]
