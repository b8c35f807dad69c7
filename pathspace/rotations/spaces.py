"""Find the spaces of features of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from torch import nn

from ..capture.capture import capture
from ..capture.captured import Captured, canonical_names
from ..inference.interpreter import interpret, scalar_offsets
from ..models.copies import cut_ties, untie
from ..models.values import has_values
from .blocks import MixedBlock, SolvedDemands
from .members import Members, merged, space_name
from .mixing import Spaces
from .space import FeatureSpaces


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Captured:
    """The model with its ties cut, unless its code does something else then."""
    twin = cut_ties(model)
    captured = capture(twin, args, kwargs)
    # (some models multiply what a head reads that is tied to the table)
    other = untie(twin) and str(capture(twin, args, kwargs).graph.graph) != str(
        captured.graph.graph
    )
    return capture(model, args, kwargs) if other else captured


def spaces(model: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None) -> FeatureSpaces:
    """Find every space of features, and which matrices may mix it without changing the function.

    For an invertible ``A``, weights that write the features become ``A w``, those that read them
    ``w A^-1``. What lies between decides which ``A`` are allowed: any (GL) between linear maps,
    orthogonal ones if a length is taken (RMS norms, whose gains move into the readers; layer norms
    keep the vector of ones, too), complex ones behind a rotary embedding, and none where an
    operation acts on each feature alone or has no rule.

    Args:
        model: any module that :func:`pathspace.trace` can capture; it needs no values.
        *args: example inputs, positional.
        kwargs: example inputs by keyword.

    Returns:
        The spaces, and for the rigid ones the reason.

    Raises:
        CaptureError: the model fails on these inputs or cannot be captured.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 2))
        >>> ps.spaces(model, torch.randn(4, 3)).free
        [Space('0.weight', GL(8))]
    """
    captured = _captured(model, args, kwargs)
    known = {
        name: buffer
        for name, buffer in captured.buffers.items()
        if name not in captured.overwritten and has_values(buffer)
    }
    reading, _ = interpret(captured, partial(Spaces, buffers=known))
    reading.fix_unused()
    offsets, shapes = scalar_offsets(captured)
    used_twice = [
        np.arange(offsets[name], offsets[name] + prod(shapes[name]))
        for name in reading.shifts
        if any(side[0] == name for side in reading.sides)
    ]
    solution = SolvedDemands(
        reading.demands, np.concatenate(used_twice) if used_twice else np.zeros(0, np.int64)
    )
    members = Members(reading.sides, solution, reading.reads)
    alike: dict[Any, list[MixedBlock]] = {}
    for block in solution.blocks:
        alike.setdefault(block.kind, []).append(block)
    found = merged([space for blocks in alike.values() for space in members.spaces_of(blocks)])
    order = {name: number for number, name in enumerate(captured.parameters)}
    found.sort(key=lambda space: (space.group == "rigid", order[space.slices[0].parameter]))
    starts, names = np.array(list(offsets.values())), list(offsets)
    taken: set[str] = set()
    for number, space in enumerate(found):
        at = np.searchsorted(starts, solution.gains_of(space.classes), side="right") - 1
        gains = tuple(names[index] for index in np.unique(at)) if space.group != "rigid" else ()
        name = space_name(space, shapes, taken)
        taken.add(name)
        found[number] = replace(space, name=name, gains=gains)
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    return FeatureSpaces(
        tuple(found), solution, offsets, sizes, canonical_names(model)[1], reading.shifts
    )
