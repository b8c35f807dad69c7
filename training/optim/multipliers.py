r"""Multipliers of the learning rate in a step on path values, known before the first step.

A step of G-SGD multiplies the gradient of an edge ``u -> v`` outside the trees by
``lr / (pre_u s_v)^2``, and the logarithm of a chain's path value changes by ``lr / p_k^2`` times
its derivative. The second factor is invariant under rescaling; the first is in the even gauge, with
``|pre_v| = |s_v|``, where it is ``lr / |p_u p_v|``. With products of many small weights they reach
``1e13``.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pathspace.paths.skeleton import Skeleton

from .layout import ids_at, tree_edges
from .settings import Manner

# above this, the largest step overflows at learning rates that suit most weights
LARGE = 1e4
BAR = 40


@dataclass(frozen=True)
class Multipliers:
    """The distribution of the multipliers of a skeleton.

    Attributes:
        decades: power of ten -> number of edges and chains with a multiplier
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


def multipliers(skeleton: Skeleton, *, even: bool = True) -> Multipliers:
    """Multipliers of all edges outside the trees and of all chains, from the current weights.

    Edges are measured in the gauge with ``|pre| = |s|``, which is the same for all rescaled copies,
    or else in that of the weights. The median is exact to a tenth of a decade.
    """
    skeleton = skeleton.live
    graph = skeleton.graph
    pre, suf = (
        torch.from_numpy(side(skeleton) / np.log(10.0))
        for side in (Skeleton.log_prefixes, Skeleton.log_suffixes)
    )
    logs = pre + suf
    ends = (logs, logs) if even else (2 * pre, 2 * suf)
    # number of multipliers by tenths of a decade
    tenths: Counter[int] = Counter()
    largest = -np.inf

    def count(powers: np.ndarray, times: np.ndarray) -> None:
        nonlocal largest
        # rounding errors of sums of logarithms must not move a 1 to the decade below
        place = np.floor(10 * powers[times > 0] + 1e-6).astype(np.int64)
        found, of_power = np.unique(place, return_inverse=True)
        numbers = np.bincount(of_power, times[times > 0], len(found)).astype(np.int64)
        tenths.update(dict(zip(found.tolist(), numbers.tolist(), strict=True)))
        largest = max(largest, float(powers[times > 0].max(initial=-np.inf)))

    for number, block in enumerate(graph.blocks):
        sides = zip(ends, (block.tail, block.head), strict=True)
        power = -sum(end[ids.abs()] * ids.sign() for end, ids in sides)
        assert isinstance(power, Tensor)
        if not power.numel():
            continue
        # edges in a tree, and scalars that are not edges, take no such step
        left_out = np.concatenate(tree_edges(skeleton, number))
        if block.unused is not None:
            unused = block.unused.expand(block.shape).reshape(-1).nonzero()[:, 0].numpy()
            left_out = np.union1d(left_out, unused)
        place = ids_at(torch.arange(power.numel()).view(power.shape), left_out, block.shape)
        without = np.bincount(place, minlength=power.numel())
        count(power.reshape(-1).numpy(), block.numel // power.numel() - without)
    chains, units = np.unique(skeleton.chain[1 : graph.num_units + 1], return_index=True)
    powers = -2 * logs[1 + units[chains > 0]].numpy()
    count(powers, np.ones(len(powers), np.int64))
    if not tenths:
        return Multipliers({}, 1.0, 1.0)
    decades: Counter[int] = Counter()
    for tenth, number in tenths.items():
        decades[tenth // 10] += number
    order = sorted(tenths)
    total = np.cumsum([tenths[tenth] for tenth in order])
    median = order[int(np.searchsorted(total, total[-1] / 2))] / 10
    powers = 10.0 ** np.clip([median, largest], -300.0, 300.0)
    return Multipliers(dict(decades), *powers.tolist())


def warn_of_multipliers(
    owner: str, skeleton: Skeleton, given: Mapping[str, Tensor], manner: Manner
) -> None:
    """Warn if an ordinary learning rate would overflow, in words of the weights as they are, which
    may be those of another copy of the model.
    """
    if manner.cap is not None:
        return
    known = skeleton.graph.parameters
    graph = replace(skeleton.graph, parameters={**known, **given})  # type: ignore[dict-item]
    skeleton = replace(skeleton, graph=graph)
    # (whether it warns is the same for all rescaled copies)
    if multipliers(skeleton).largest > LARGE:
        found, power = multipliers(skeleton, even=False), 0.5 * manner.power
        other = "" if skeleton.rule == "magnitude" else "take rule='magnitude', "
        warnings.warn(
            f"{owner} multiplies the learning rate by {found.median**power:.0e} at the median and"
            f" {found.largest**power:.0e} at most (rule {skeleton.rule!r}), so that rates which"
            " train most weights make others overflow: pass max_multiplier=1.0 or relative=True,"
            f" start from init_skeleton_(model, skeleton), {other}or see"
            " pathspace.training.suggest(model, graph).",
            stacklevel=4,
        )


def warn_of_zeros(owner: str, given: Mapping[str, Tensor]) -> None:
    """Warn about trained weights of value 0, which relative steps do not change."""
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
