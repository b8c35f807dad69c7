"""The gauge with the least noise from rounded weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import expect_arguments, expect_numbers
from ..gauge.moves import moved
from ..gauge.rescale import rescale_
from ..graph.structure import Structure
from ..models.copies import safe_deepcopy
from ..shown import Shown
from .calibration import HOLD, is_safely_less
from .choice import Gauge, choose_gauge
from .objectives import Noise, calibrated
from .quantise import check_format, decibels, quantised_weights, weight_axes

# how much of the way to the chosen gauge is tried
STEPS = (1.0, 0.5)
# how many gauges near the best one, and how many weights are rounded for them in all
TRIALS, WORK = 80, 1 << 31
# from how many samples on some are held out
MANY = 6
# the noise is predicted to first order only: a rough minimum will do
ENOUGH, SEARCH = 1e-2, 60
# largest change of a log-scale in a search
WIDTH = 0.1


@dataclass(frozen=True, eq=False)
class Equalised(Shown):
    """A model in the chosen gauge, and its gain.

    Attributes:
        model: the rescaled copy, with weights as they are before rounding: the same function.
        phi: log-scales that lead to it, ``(H,)``.
        before: signal over quantisation noise of the outputs as trained, in decibels, on
            the calibration batches.
        after: the same for ``model``.
        bits: of each weight.
        per: one step for each ``"tensor"`` or ``"channel"``.
        helped: whether the gauge was changed.
        gauges: those that minimise the predicted noise with one step for each ``per``, and for each
            of the other kind; each with its certificate.
        made_up: whether the batches were random numbers, which say little about real data.
    """

    model: nn.Module
    phi: Tensor
    before: float
    after: float
    bits: int
    per: str
    helped: bool
    gauges: tuple[Gauge, ...]
    made_up: bool

    def __str__(self) -> str:
        on = "random inputs" if self.made_up else "the given inputs"
        form = f"{self.bits} bits per {self.per}"
        if not self.helped:
            return (
                f"{form}: {self.before:.1f} dB on {on} as trained; no gauge is safely better, the"
                " model is as it was"
            )
        return (
            f"{form}: {self.before:.1f} dB as trained, {self.after:.1f} dB in the new gauge, on"
            f" {on}"
        )


def equalise(
    model: nn.Module,
    graph: Structure,
    bits: int = 8,
    per: str = "tensor",
    calibration: Any = None,
    *,
    trials: int | None = None,
) -> Equalised:
    """Rescale a model so that its outputs change as little as possible when its weights
    are rounded to a few bits.

    The gauges that minimise :class:`pathspace.Noise` are tried, whole and half the way to them,
    by rounding the weights and running the model on the calibration batches; near the best of
    them a search goes on for rounding errors that cancel. What is found is taken if it is better,
    by more than chance, on every third sample, which nothing was chosen on. Else the model stays
    as it was trained, and says so.

    A quantiser that folds batch norms first undoes their gauge: give it, and this function,
    ``ps.fold_norms(model)``. ``ps.lift_clips`` frees the units behind ReLU6.

    Args:
        model: the model whose parameters ``graph`` holds, or a copy of it; it is not changed.
        graph: its reduction graph.
        bits: of each weight, symmetric around 0.
        per: one step for each ``"tensor"`` or ``"channel"``.
        calibration: batches that are like those in use, see :func:`pathspace.choose_gauge`;
            random inputs by default.
        trials: how often the model is run to search near the best gauge; 80 times by default, and
            less for more than 27 million weights (16 for 135 million).

    Raises:
        InputError: bits or granularity make no sense, or the model does not run on the batches.
        InputTypeError: an argument is of another kind.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(8, 32), ReLU(), Linear(32, 4))
        >>> graph, x = ps.trace(model, torch.randn(1, 8)), torch.randn(256, 8)
        >>> scrambled = ps.rescale_(model, graph, torch.randn(graph.num_units))
        >>> found = ps.equalise(scrambled, graph, bits=6, calibration=x)
        >>> found.helped, found.after > found.before + 3
        (True, True)
    """
    expect_arguments("equalise", model=model, graph=graph)
    check_format(bits, per)
    expect_numbers("equalise", "a whole number from 0 to 1,000,000", or_none=True, trials=trials)
    random = calibration is None
    if random:
        warnings.warn(
            "equalise found no calibration batches and makes up random ones, which say little about"
            " real data; pass calibration=.",
            stacklevel=2,
        )
    held = calibrated(model, graph, calibration)
    rounded = Rounded(model, graph, bits, per)
    if trials is None:
        trials = min(TRIALS, math.ceil(WORK / max(graph.num_weights, 1)))
    # (the noise is predicted to first order only: the other granularity is tried as well)
    kinds = (per, "channel" if per == "tensor" else "tensor")
    gauges = tuple(
        choose_gauge(model, graph, Noise(bits, kind), held, tolerance=ENOUGH, steps=SEARCH)
        for kind in kinds
    )

    stay = torch.zeros(graph.num_units, dtype=torch.float64)
    before = held.noise(rounded.at(stay))
    few, places = len(before) < MANY, torch.arange(len(before))
    judge, fit = (places % HOLD == 1) | few, (places % HOLD != 1) | few

    def seen(phi: Tensor) -> float:
        return float(held.noise(rounded.at(phi))[fit].mean().nan_to_num(math.inf))

    first = min((stay, *(step * gauge.phi for gauge in gauges for step in STEPS)), key=seen)
    phi, after = stay, before
    for one in (searched(rounded, first, seen, trials), first):
        found = held.noise(rounded.at(one))
        if all(is_safely_less(found[on], before[on]) for on in (judge, fit)):
            phi, after = one, found
            break
    return Equalised(
        model=rescale_(safe_deepcopy(model), graph, phi),
        phi=phi,
        before=decibels(float(before.mean())),
        after=decibels(float(after.mean())),
        bits=bits,
        per=per,
        helped=phi is not stay,
        gauges=gauges,
        made_up=random,
    )


class Rounded:
    """Tensors of a model in other gauges, with the quantised ones rounded to a few bits."""

    def __init__(self, model: nn.Module, graph: Structure, bits: int, per: str) -> None:
        self.graph, self.bits, self.per, self.axes = graph, bits, per, weight_axes(model)
        named = (*model.named_parameters(), *model.named_buffers())
        self.own = {name: tensor.detach() for name, tensor in named}

    def at(self, phi: Tensor) -> dict[str, Tensor]:
        """All tensors at ``phi``."""
        found = dict(self.own)
        for name, ends in self.graph.gauge_factors(phi).items():
            found[name] = moved(found[name], *ends, self.graph.shifts.get(name, 0.0))
        return found | quantised_weights(found, self.axes, self.bits, self.per)


def searched(
    rounded: Rounded, phi: Tensor, noise: Callable[[Tensor], float], trials: int
) -> Tensor:
    """A gauge near ``phi`` in which the errors of rounded weights cancel better.

    Rounding errors behave like random numbers, which a small change of a scale draws again: each
    trial moves the output units of one tensor at random, and is kept if the noise falls.
    """
    graph, generator = rounded.graph, torch.Generator().manual_seed(0)
    heads = [b.head.abs().unique() for b in graph.blocks if b.name in rounded.axes]
    units = [ids[(ids > 0) & (ids <= graph.num_units)] - 1 for ids in heads]
    # (equal sets are moved once)
    groups = [torch.tensor(ids) for ids in {tuple(ids.tolist()): None for ids in units} if ids]
    if not groups or trials < 1:
        return phi
    least, order = noise(phi), list(range(len(groups)))
    for trial in range(trials):
        if trial % len(groups) == 0:
            order = torch.randperm(len(groups), generator=generator).tolist()
        group, move = groups[order[trial % len(groups)]], torch.zeros_like(phi)
        move[group] = WIDTH * (2 * torch.rand(len(group), generator=generator, dtype=phi.dtype) - 1)
        there = phi + graph.exact_part(move)
        found = noise(there)
        if found < least:
            phi, least = there, found
    return phi
