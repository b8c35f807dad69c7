"""The walk of one sample through a residual chain, in the plane of its principal directions.

Its points are ``x_0 + sum_{k <= l} z_k``: the first stream plus the directions of the nodes so far.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..shared.model_calls import call
from ..shared.sample_rows import batch_size
from .addition_hooks import Addition, Sites

if TYPE_CHECKING:
    from .nodes import Nodes


class Walk(NamedTuple):
    """The walk of one sample through consecutive nodes whose states have the same shape.

    Attributes:
        names: the nodes.
        points: coordinates in the plane of its two principal directions, shape (K + 1, 2).
        folds: share of consecutive steps with ``<z_l, z_{l+1}> < 0``.
    """

    names: tuple[str, ...]
    points: Tensor
    folds: float


def walks(chain: Nodes, inputs: Any, sample: int = 0) -> list[Walk]:
    """The walk of one sample through the chain, split at changes of the states'
    shape, in order of execution.

    The points are the first stream plus the sum of the directions so far; they differ from the
    streams if a norm or an activation follows each sum.

    Args:
        chain: the traced chain.
        inputs: model inputs.
        sample: index of the sample.

    Returns:
        One walk for each run of nodes; every node is in exactly one.

    Reference:
        Learnable Markov chain paper, Appendix F, Figure 7.
    """
    places, known = chain.samples(), chain.by_site()
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    count = 1

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal count
        count = batch_size((args, kwargs))

    def note(addition: Addition) -> Tensor:
        node = known.get(addition.site)
        if node is None:
            return addition.run()
        stream, branch = node.split(addition)
        place = places[node.index]
        start = place.rows(stream, count)[sample].double().clone()
        step = node.scale * place.rows(branch, count)[sample].double()
        seen[node.index] = (start, step.clone())
        return addition.run()

    with torch.no_grad(), Sites(note, begin).following(chain.model):
        call(chain.model, inputs)
    found = []
    for _, run in groupby(sorted(seen), key=lambda index: len(seen[index][0])):
        indices = list(run)
        names = tuple(chain.nodes[index].name for index in indices)
        found.append(
            _walk(names, seen[indices[0]][0], torch.stack([seen[index][1] for index in indices]))
        )
    return found


def _walk(names: tuple[str, ...], start: Tensor, steps: Tensor) -> Walk:
    points = torch.cat([start[None], start + steps.cumsum(0)])
    centred = points - points.mean(0)
    _, _, axes = torch.linalg.svd(centred, full_matrices=False)
    plane = centred @ axes[:2].T
    plane = torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
    turns = (steps[1:] * steps[:-1]).sum(1) < 0
    return Walk(names, plane, float(turns.double().mean()) if len(turns) else 0.0)
