"""All measurements of one training step, also as one row of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..chain.efficiency import ChainRecord
from .probe import Pass
from .weights import GroupFacts, TensorFacts


@dataclass
class UnitFacts:
    """The model's units as a whole, compared with the first step that was measured.

    Attributes:
        groups: the units between two layers, group by group.
        conserved: largest change of a quantity that gradient flow conserves, over the
            sum of squares at the unit.
        gauge: median over units of the change of ``log10`` of incoming over outgoing weights.
        step_median: median over units of the last step of the unit's incoming
            weights, over their norm.
        step_largest: its 99 % quantile.
        path_median: median of ``log10 |path value|``.
        path_largest: the largest.
    """

    groups: list[GroupFacts] = field(default_factory=list)
    conserved: float | None = None
    gauge: float | None = None
    step_median: float | None = None
    step_largest: float | None = None
    path_median: float | None = None
    path_largest: float | None = None


@dataclass
class Snapshot:
    """One measured step.

    Attributes:
        step: number of optimizer steps at its end.
        layers: the first forward and backward pass of the step.
        tensors: the trainable tensors.
        units: the units, if the model could be traced.
        chain: the residual additions, if there are any.
        rate: the largest learning rate of the optimizer's groups; ``None`` outside of training.
        searched: whether the optimizer computes the loss several times in a step, and the last
            one that did so ended at a lower one.
        batches: number of batches in the data, if known.
        decay: the largest share of a weight that weight decay removes in a step.
        eps: the optimizer's eps over the largest root mean square of a
            tensor's gradients in its state.
        seconds: time spent on the measurement.
    """

    step: int
    layers: Pass
    tensors: list[TensorFacts]
    units: UnitFacts = field(default_factory=UnitFacts)
    chain: ChainRecord | None = None
    rate: float | None = None
    decay: float | None = None
    eps: float | None = None
    searched: bool = False
    batches: int | None = None
    seconds: float = 0.0

    def row(self) -> dict[str, float]:
        """Numbers by name: those of the whole model, then ``name/layer`` for
        each layer, tensor and node.
        """
        units = self.units
        moved = [t.moved for t in self.tensors if t.matrix and t.moved is not None]
        weighted = [layer for layer in self.layers.layers if layer.weighted]
        dead = [
            1 - float(layer.live.float().mean()) for layer in weighted if layer.live is not None
        ]
        found: dict[str, Any] = {
            "step": self.step,
            "loss": self.layers.loss,
            "learning_rate": self.rate,
            "efficiency": None if self.chain is None else self.chain.mean_efficiency,
            "relative_step": median(moved) if moved else None,
            "relative_step_largest": max(moved, default=None),
            "unit_step": units.step_median,
            "unit_step_largest": units.step_largest,
            "gauge_drift": units.gauge,
            "conserved_drift": units.conserved,
            "path_value_median": units.path_median,
            "path_value_largest": units.path_largest,
            "dead_share_largest": max(dead, default=None),
            "seconds": self.seconds,
        }
        for layer in weighted:
            found[f"signal/{layer.name}"] = layer.rms_out
            found[f"gradient/{layer.name}"] = layer.gradient
        for tensor in self.tensors:
            if tensor.matrix:
                found[f"step/{tensor.name}"] = tensor.moved
        if self.chain is not None:
            means = self.chain.cosines.nanmean(1).tolist()
            found |= {
                f"cosine/{name}": value for name, value in zip(self.chain.names, means, strict=True)
            }
        return {name: float(v) for name, v in found.items() if v is not None and math.isfinite(v)}
