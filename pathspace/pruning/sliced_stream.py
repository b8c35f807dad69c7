"""A residual stream with fewer features: rotated to its principal components, and cut.

Source: Ashkboos et al., *SliceGPT: Compress Large Language Models by Deleting Rows and Columns*
(2024), with one rotation for the whole stream in place of one for each block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, UnsupportedError, first_line
from ..fitting.weight_inputs import WeightInputs
from ..inference.sides import Side
from ..models.copies import safe_deepcopy
from ..models.nested import mapped
from ..models.walk import every_tensor, tensors_of
from ..rotations.rotate import rotate_
from ..rotations.space import FeatureSpaces, Space
from ..rotations.spaces import spaces
from .declared_sizes import follow_config
from .groups import ChannelGroup, Cut
from .removal import remove_channels


def slice_stream(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    keep: float = 0.75,
    calibration: Iterable[Mapping[str, Any]] | None = None,
) -> nn.Module:
    """A smaller model whose residual stream has its principal components alone.

    The stream is rotated so that its features are the principal components of what its readers see
    on the calibration data (``C = sum x x^T`` after the norms, whose gains are folded); the last
    ones are cut from every weight, and norms by the root mean square are told the former size by a
    gain of ``sqrt(n / k)``. This changes the function; the rotation alone does not.

    Args:
        model: a model whose stream has the group ``O`` (:func:`pathspace.spaces`).
        *args: example inputs, positional.
        kwargs: example inputs by keyword.
        keep: the share of features that stay, rounded to whole ones. (Some libraries save a model
            only if its attention heads divide this number.)
        calibration: typical inputs by keyword, one dictionary for each batch; by default the
            example inputs.

    Returns:
        A new model; this one does not change.

    Raises:
        InputError: ``keep`` is not a share, or leaves nothing.
        UnsupportedError: the model has no such stream, or its code names the size.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(9, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 9)
        ... )
        >>> small = ps.slice_stream(model, torch.arange(9), keep=0.5)
        >>> small[0].weight.shape, small(torch.arange(9)).shape
        (torch.Size([9, 4]), torch.Size([9, 9]))
    """
    if not 0 < keep <= 1:
        raise InputError(f"slice_stream found keep={keep!r}, expected a share in (0, 1].")
    found = spaces(model, *args, kwargs=kwargs)
    stream = _stream(model, found)
    size = stream.size
    count = round(keep * size)
    if not count:
        raise InputError(f"slice_stream found keep={keep!r}, which leaves none of {size} features.")
    twin = rotate_(safe_deepcopy(model), found, {stream.name: torch.eye(size).double()})
    batches = (
        [(args, dict(kwargs or {}))] if calibration is None else (((), c) for c in calibration)
    )
    components = torch.linalg.eigh(_second_moments(twin, stream, batches))[1].flip(1).T
    rotate_(twin, found, {stream.name: components})
    cut = Cut(_group(stream, twin), torch.arange(count))
    remove_channels(twin, [cut], {})
    with torch.no_grad():
        for name in stream.gains:
            tensors_of(twin)[name].fill_(math.sqrt(size / count) - found.shifts[name])
    follow_config(twin, [cut])
    try:
        with torch.no_grad():
            twin(*args, **(kwargs or {}))
    except Exception as error:  # (the model's code may raise anything)
        raise UnsupportedError(
            f"slice_stream cut {stream.name!r} to {count} features, but the code of"
            f" {type(model).__name__} contains a number that does not follow"
            f" ({first_line(error)}); take sizes from the weights there."
        ) from error
    return twin


def _stream(model: nn.Module, found: FeatureSpaces) -> Space:
    """The largest space with the group ``O`` whose features are in order in every weight."""
    some = [
        space
        for space in found.free
        if space.group == "O"
        and space.count == 1
        and all(torch.equal(part.positions[0], torch.arange(space.size)) for part in space.slices)
    ]
    if not some:
        largest = max(found, key=lambda space: space.size * len(space.slices), default=None)
        why = f"{largest.name!r} is {largest.label} ({largest.reason})" if largest else "no weights"
        raise UnsupportedError(
            f"slice_stream found no space of the group O in {type(model).__name__}, expected a"
            f" stream behind norms by the root mean square: {why}; see ps.spaces(model, x)."
        )
    return max(some, key=lambda space: len(space.slices))


def _second_moments(model: nn.Module, stream: Space, batches: Iterable[Any]) -> Tensor:
    """``sum x x^T`` of what is multiplied by the weights that read the stream, in float64."""
    total = torch.zeros(stream.size, stream.size, dtype=torch.float64)
    readers = set(stream.readers)

    def look(name: str, _dim: int, given: Tensor) -> Tensor:
        if name in readers and given.shape[-1] == stream.size:
            seen = given.detach().to("cpu", torch.float64).reshape(-1, stream.size)
            total.add_(seen.T @ seen)
        return given

    device = next(model.parameters()).device
    with torch.no_grad(), WeightInputs(every_tensor(model, "_parameters"), look):
        for batch in batches:
            args, kwargs = mapped(lambda leaf: leaf.to(device), batch)
            model(*args, **kwargs)
    if not bool(total.any()):
        raise UnsupportedError(
            f"slice_stream found no product of {stream.name!r} with a weight, expected some whose"
            " inputs can be measured; rotate the stream by ps.rotate_ with a matrix of your own."
        )
    return total


def _group(stream: Space, model: nn.Module) -> ChannelGroup:
    """The features of the stream as channels, gains included."""
    slices: dict[Side, Tensor] = {
        (part.parameter, part.dim): part.positions.reshape(-1, 1) for part in stream.slices
    }
    for name in stream.gains:
        shape = tensors_of(model)[name].shape
        slices[name, shape.index(stream.size)] = torch.arange(stream.size)[:, None]
    reads = frozenset((part.parameter, part.dim) for part in stream.slices if part.reads)
    return ChannelGroup(stream.name, slices, reads)
