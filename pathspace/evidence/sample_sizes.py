"""Input sizes at which a model is sampled: small images, and batches that are not too small.

A symmetry holds at every size that the model accepts, so derivatives at other
sizes also bound their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..capture.sizes import Inputs, resized
from ..capture.tracer import FakeModel as Rehearsal
from ..errors import PathspaceError
from ..models.inputs import ordinary

# shorter lengths to try: a total stride of 32 leaves two positions, and some models
# need multiples of a number
LENGTHS = (33, 40, 48, 64, 96, 128, 160, 192)
# batch statistics normalise any two numbers to 1 and -1, so batches are larger
BATCH = 4
# input elements that cost almost no time: a larger batch gives more outputs per run
FREE, MOST = 2_000, 32
# above this number of weights each sample is expensive: in eval mode, one sample per batch is tried
DEAR = 1_000_000


def sample_sizes(model: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Inputs, ...]]:
    """Inputs at which to sample a model, the cheapest first.

    Args:
        model: any module.
        args: example inputs.
        kwargs: example inputs by keyword.

    Yields:
        Inputs of two batch sizes, or of one if the model accepts only that; the given
        inputs alone at the end.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1))
        >>> [
        ...     tuple(args[0].shape)
        ...     for (args, _), *_ in sample_sizes(model, (torch.ones(1, 3, 45, 45),), {})
        ... ]
        [(1, 3, 33, 33), (1, 3, 40, 40), (1, 3, 45, 45), (4, 3, 45, 45), (1, 3, 45, 45)]
    """
    given = ordinary((args, kwargs))
    try:
        rehearsal = Rehearsal(model)
    except (PathspaceError, RuntimeError):
        yield (given,)
        return
    dear = not model.training and sum(weight.numel() for weight in model.parameters()) > DEAR
    for inputs in (*_shorter(rehearsal, given), given):
        chosen = _first(rehearsal, inputs) if dear else inputs
        larger = tuple(_more(rehearsal, chosen, 2 if dear else BATCH))
        yield (chosen, *larger)
    if larger:
        yield larger
        yield (given,)


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _shorter(rehearsal: Rehearsal, given: Inputs) -> Iterator[Inputs]:
    """Images, volumes and signals cut to each of the shorter lengths that the model accepts."""
    sides = {
        (number, dim): size
        for number, tensor in enumerate(_tensors(given))
        if tensor.is_floating_point() and tensor.dim() > 2
        for dim, size in enumerate(tensor.shape)
        if dim
    }
    for length in LENGTHS:
        cut = {place: length for place, size in sides.items() if size > length}
        for chosen in (cut, {place: n for place, n in cut.items() if place[1] > 1}):
            inputs = resized(given, chosen)
            if chosen and rehearsal.runs(*inputs):
                yield inputs
                break


def _batched(inputs: Inputs) -> tuple[list[tuple[int, Tensor]], set[int]]:
    """Numbered tensors that may have a batch dimension, and the sizes of that dimension."""
    batched = [(number, tensor) for number, tensor in enumerate(_tensors(inputs)) if tensor.dim()]
    return batched, {tensor.shape[0] for _, tensor in batched}


def _first(rehearsal: Rehearsal, inputs: Inputs) -> Inputs:
    """The first sample of a batch, if the model accepts it."""
    batched, sizes = _batched(inputs)
    first = resized(inputs, {(number, 0): 1 for number, _ in batched})
    return first if len(sizes) == 1 and rehearsal.runs(*first) else inputs


def _more(rehearsal: Rehearsal, inputs: Inputs, least: int) -> Iterator[Inputs]:
    """The same inputs with a larger batch, of at least ``least`` samples,
    if the model accepts it.
    """
    batched, sizes = _batched(inputs)
    if len(sizes) != 1:
        return
    size = sizes.pop()
    free = FREE // max(1, sum(tensor[:1].numel() for _, tensor in batched))
    batch = max(least, 2 * size, min(free, MOST))
    larger = resized(inputs, {(number, 0): batch for number, _ in batched})
    if rehearsal.runs(*larger):
        yield larger
