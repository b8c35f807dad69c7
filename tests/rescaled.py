"""How far the outputs of a model move when its units are rescaled: a copy, run as written."""

from __future__ import annotations

import copy
from typing import Any

import torch
from oracles.scales import outputs
from torch import nn

import pathspace as ps


@torch.no_grad()
def change(
    model: nn.Module, graph: ps.ReductionGraph, *samples: Any, spread: float = 1.0, **options: Any
) -> float:
    """The largest change of the outputs, relative to the largest of them, under one random draw of
    log-scales, and of other numbers in parameters that are used at no size.

    Args:
        model: the model.
        graph: its graph.
        samples: inputs; all those of one call in a tuple.
        spread: standard deviation of the log-scales.
        options: further ones of `ps.rescale_`.
    """
    phi = spread * torch.randn(graph.num_units, dtype=torch.float64)
    other, worst = ps.rescale_(copy.deepcopy(model), graph, phi, **options), 0.0
    for name in set(graph.unused) - set(graph.beyond):
        other.get_parameter(name).normal_()
    for sample in samples:
        given = sample if isinstance(sample, tuple) else (sample,)
        # (the same random numbers in both)
        with torch.random.fork_rng(devices=[]):
            before = outputs(model(*given))
        after = outputs(other(*given))
        assert torch.equal(before.isnan(), after.isnan())
        gap = torch.where((before == after) | before.isnan(), 0.0, (before - after).abs())
        worst = max(worst, float(gap.max() / before[before.isfinite()].abs().max()))
    return worst


def traced(model: nn.Module, *given: Any, units: int, within: float = 1e-9) -> ps.ReductionGraph:
    """The graph of a model, whose units are as many as counted by hand, and are symmetries."""
    graph = ps.trace(model, *given)
    assert graph.num_units == units
    assert change(model, graph, given) < within
    return graph
