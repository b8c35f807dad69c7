"""At which input sizes a model is sampled: any that it takes will do, so small images, and batches not too small.

A symmetry holds at every size a model takes, so that derivatives at other sizes bound their number just as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pathspace.errors import PathspaceError
from pathspace.inputs import ordinary
from pathspace.rehearsal import Rehearsal
from pathspace.sizes import Inputs, resized

# lengths that are tried in place of longer ones: strides of 32 leave two positions, and some models want multiples
LENGTHS = (33, 40, 48, 64, 96, 128, 160, 192)
# statistics over two numbers are 1 and -1 whatever the numbers are
BATCH = 4
# numbers that take next to no time: with more samples at once there are more outputs at once
FREE, MOST = 2_000, 32


def sample_sizes(model: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Inputs, ...]]:
    """Inputs to sample a model at, the cheapest first: small ones, those given and a larger batch, then one of both.

    Args:
        model: any module.
        args: example inputs.
        kwargs: example inputs by keyword.

    Yields:
        Inputs of two batch sizes, or of one where the model takes no other; those given alone at the end.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1))
        >>> [tuple(args[0].shape) for (args, _), *_ in sample_sizes(model, (torch.ones(1, 3, 45, 45),), {})]
        [(1, 3, 33, 33), (1, 3, 40, 40), (1, 3, 45, 45), (4, 3, 45, 45), (1, 3, 45, 45)]
    """
    given = ordinary((args, kwargs))
    try:
        rehearsal = Rehearsal(model)
    except (PathspaceError, RuntimeError):
        yield (given,)
        return
    for inputs in (*_shorter(rehearsal, given), given):
        larger = tuple(_more(rehearsal, inputs))
        yield (inputs, *larger)
    if larger:
        yield larger
        yield (given,)


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _shorter(rehearsal: Rehearsal, given: Inputs) -> Iterator[Inputs]:
    """Images, volumes and signals with a shorter side, as many as there are lengths that the model takes."""
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


def _more(rehearsal: Rehearsal, inputs: Inputs) -> Iterator[Inputs]:
    """The same with a larger batch."""
    batched = [(number, tensor) for number, tensor in enumerate(_tensors(inputs)) if tensor.dim()]
    sizes = {tensor.shape[0] for _, tensor in batched}
    if len(sizes) != 1:
        return
    size = sizes.pop()
    free = FREE // max(1, sum(tensor[:1].numel() for _, tensor in batched))
    batch = max(BATCH, 2 * size, min(free, MOST))
    larger = resized(inputs, {(number, 0): batch for number, _ in batched})
    if rehearsal.runs(*larger):
        yield larger


__all__ = ["sample_sizes"]
