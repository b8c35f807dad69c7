"""The copy of a model on which theorems are measured, and the precision of what it shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..capture.capture import check_runs
from ..graph.structure import Structure
from ..models.modes import precision
from ..models.running import LARGE, ForwardRun, cast, run_forward
from ..models.stand_in import repeatable, stand_in


def bench_copy(
    model: nn.Module, graph: Structure, inputs: tuple[Any, Any]
) -> tuple[nn.Module, torch.dtype]:
    """A module to measure on: a float64 copy, or where that is too large one that
    shares the model's tensors.

    A model that insists on another precision (it names one in its forward) is
    measured on a copy in its own.
    """
    own, written = precision(model), graph.captured.written.values()
    if graph.num_weights > LARGE:
        return repeatable(stand_in(model), written), own
    bench = repeatable(stand_in(model, share_tensors=False).double(), written)
    try:
        run_forward(bench, *cast(inputs, torch.float64))
    except (RuntimeError, ValueError):
        # what can be captured need not run: then one sentence says so
        check_runs(model, *inputs)
        return repeatable(stand_in(model, share_tensors=False), written), own
    return bench, torch.float64


def resolution(
    graph: Structure, model: nn.Module, before: ForwardRun, any_factor: bool = False
) -> torch.dtype:
    """The type to whose precision a rescaling can be seen: the model's, or a coarser
    one that it computes in.

    Powers of two pass through any type without rounding; other factors
    (``any_factor``) and sums do not.
    """
    own = precision(model)
    result: torch.dtype = max(
        {own, *(before.types if graph.shifts or any_factor else ())},
        key=lambda dtype: torch.finfo(dtype).eps,
    )
    return result
