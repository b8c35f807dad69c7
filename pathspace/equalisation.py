"""The gauge in which rounding the weights hurts least."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.calibration import Calibrated, made_up
from pathspace.convex import Programme
from pathspace.errors import expect_arguments
from pathspace.gauge_choice import Gauge, choose_gauge
from pathspace.objectives import Noise
from pathspace.quantise import check_format, decibels, quantised_weights, weight_axes
from pathspace.rescale import rescale
from pathspace.safe_deepcopy import safe_deepcopy
from pathspace.structure import Structure

# how much of the way to the chosen gauge is tried
STEPS = (1.0, 0.5)
# standard errors by which the noise of the samples has to fall, and by which factor at least
ERRORS, LEAST, ALONE = 2.0, 0.97, 0.8
# the noise is predicted to first order only: a rough minimum will do
ENOUGH, SEARCH = 1e-2, 60


@dataclass(frozen=True, eq=False)
class Equalised:
    """A model in the gauge that was found, and what it gains.

    Attributes:
        model: the rescaled copy, with weights as they are before rounding: the same function.
        phi: log-scales that lead to it, ``(H,)``.
        before: signal over quantisation noise of the outputs as trained, in decibels, on the calibration batches.
        after: the same for ``model``.
        bits: of each weight.
        per: one step for each ``"tensor"`` or ``"channel"``.
        helped: whether the gauge was changed.
        gauge: the gauge that minimises the predicted noise, with its certificate.
        made_up: whether the batches were random numbers, which say little about data in use.
    """

    model: nn.Module
    phi: Tensor
    before: float
    after: float
    bits: int
    per: str
    helped: bool
    gauge: Gauge
    made_up: bool

    def __str__(self) -> str:
        on = "random inputs" if self.made_up else "the calibration batches"
        form = f"{self.bits} bits per {self.per}"
        if not self.helped:
            return f"{form}: {self.before:.1f} dB on {on} as trained; no gauge is safely better, the model is as it was"
        return f"{form}: {self.before:.1f} dB as trained, {self.after:.1f} dB in the new gauge, on {on}"


@dataclass(frozen=True)
class Known:
    """An objective whose programme is known already."""

    programme_known: Programme
    name: str

    def programme(self, *_: Any) -> Programme:
        """What is known."""
        return self.programme_known

    def __str__(self) -> str:
        return self.name


def equalise(
    model: nn.Module, graph: Structure, bits: int = 8, per: str = "tensor", calibration: Any = None
) -> Equalised:
    """Rescale a model so that its outputs change as little as possible when its weights are rounded to a few bits.

    The gauge that minimises :class:`pathspace.Noise` is tried, whole and half the way to it, by rounding the weights
    and running the model on the calibration batches; the best is taken if it is better by more than chance. Else the
    model stays as it was trained, and says so.

    A quantiser that folds batch norms first undoes their gauge: give it, and this function,
    ``ps.fold_norms(model)``. ``ps.lift_clips`` frees the units behind ReLU6.

    Args:
        model: the model whose parameters ``graph`` holds, or a copy of it; it is not changed.
        graph: its reduction graph.
        bits: of each weight, symmetric around 0.
        per: one step for each ``"tensor"`` or ``"channel"``.
        calibration: batches that are like those in use, see :func:`pathspace.choose_gauge`; random inputs by default.

    Returns:
        The rescaled copy, and what it gains.

    Raises:
        InputError: bits or granularity make no sense, or the model does not run on the batches.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        >>> graph, x = ps.trace(model, torch.randn(1, 8)), torch.randn(256, 8)
        >>> scrambled = ps.rescale(model, graph, torch.randn(graph.num_units))
        >>> found = ps.equalise(scrambled, graph, bits=6, calibration=x)
        >>> found.helped, found.after > found.before + 3
        (True, True)
    """
    expect_arguments("equalise", model=model, graph=graph)
    check_format(bits, per)
    random = calibration is None
    held = Calibrated(model, made_up(model, graph.captured) if random else calibration)
    reference, axes = held.reference(), weight_axes(model)

    def noise(net: nn.Module) -> Tensor:
        own = dict(net.named_parameters())
        return held.noise(reference, {**own, **dict(net.named_buffers()), **quantised_weights(own, axes, bits, per)})

    felt = held.sensitivity()
    before = noise(model)
    best, chosen, first = before, None, None
    for gauge in _gauges(model, graph, bits, per, felt):
        first = gauge if first is None else first
        for step in STEPS:
            phi = step * gauge.phi
            found = noise(rescale(safe_deepcopy(model), graph, phi))
            if _is_safely_less(found, before) and float(found.mean()) < float(best.mean()):
                best, chosen = found, phi
    assert first is not None
    phi = torch.zeros_like(first.phi) if chosen is None else chosen
    return Equalised(
        model=rescale(safe_deepcopy(model), graph, phi) if chosen is not None else safe_deepcopy(model),
        phi=phi,
        before=decibels(float(before.mean())),
        after=decibels(float(best.mean())),
        bits=bits,
        per=per,
        helped=chosen is not None,
        gauge=first,
        made_up=random,
    )


def _gauges(model: nn.Module, graph: Structure, bits: int, per: str, felt: dict[str, Tensor]) -> Iterator[Gauge]:
    """The best one for this granularity, and for the other: the noise is predicted to first order only."""
    for kind in (per, "channel" if per == "tensor" else "tensor"):
        objective = Noise(bits, kind)
        known = Known(objective.programme_of(model, graph, felt), str(objective))
        yield choose_gauge(model, graph, known, tolerance=ENOUGH, steps=SEARCH)


def _is_safely_less(after: Tensor, before: Tensor) -> bool:
    """Whether noise falls by more than chance, sample by sample."""
    if not bool(after.isfinite().all()):
        return False
    change = after - before
    if len(change) < 2:
        return float(after.sum()) < ALONE * float(before.sum())
    error = float(change.std()) / math.sqrt(len(change))
    return float(change.mean()) < -ERRORS * error and float(after.mean()) < LEAST * float(before.mean())


__all__ = ["Equalised", "Known", "equalise"]
