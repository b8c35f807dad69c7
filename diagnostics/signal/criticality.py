"""Order and chaos: the growth of a perturbation through depth or time, and the
weight scale at the boundary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathspace.errors import (
    COUNT,
    SEED,
    InputError,
    InputTypeError,
    expect_arguments,
    expect_numbers,
)
from pathspace.models.copies import safe_deepcopy

from ..shared.selection import Names, Types, matching, select
from ..shared.tables import Estimate, Table
from .tangents import follow_tangents
from .theory import MATRICES

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Exponent:
    """Mean log growth of a perturbation per step of depth or time.

    Attributes:
        growth: the exponent with its standard error over perturbations.
        low: lower end of the 95 % confidence interval.
        high: upper end of it.
        steps: number of measured steps after the burn-in.
        died: number of perturbations that became exactly zero; they are left out.
        profile: mean log RMS of the perturbation at every recorded place.
    """

    growth: Estimate
    low: float
    high: float
    steps: int
    died: int
    profile: tuple[float, ...]

    @property
    def phase(self) -> str:
        """``"order"``, ``"chaos"``, or ``"undecided"`` if the interval contains zero."""
        return "order" if self.high < 0 else "chaos" if self.low > 0 else "undecided"


def growth_exponent(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    names: Names = None,
    types: Types = None,
    at: Any = None,
    start: str | None = None,
    directions: int = 4,
    burn_in: int | None = None,
    seed: int = 0,
) -> Exponent:
    """Measure ``lambda = mean over l of log(|dz_{l+1}| / |dz_l|)`` for infinitesimal
    perturbations of the first input.

    The perturbation is propagated by forward-mode differentiation in float64, so it is exact
    and has no size. Places are the calls of the chosen layers in order of execution, or, for a
    recurrent layer of torch (RNN, GRU, LSTM), the time steps of its output. By default they
    are the time steps of the recurrent layer, or the linear and convolutional layers with the
    most frequent output shape. For residual nets name the blocks, because the layers inside a
    block see only the branch.

    Args:
        model: any module; a float64 copy runs.
        *inputs: one batch; its samples count as independent perturbations.
        kwargs: keyword inputs.
        names: patterns of layer names.
        types: classes, or names of classes.
        at: index of the part of the first input to perturb (the first time step: ``0``, or
            ``(slice(None), 0)`` with ``batch_first``); by default all of it, or the first time step
            for recurrent layers of torch.
        start: name of a layer (such as an embedding) whose output is perturbed
            instead of the first input.
        directions: number of random perturbations per sample.
        burn_in: number of steps left out at the start; by default a quarter of all.
        seed: seed of the perturbations.

    Returns:
        The exponent; the interval covers perturbations and samples of this one network, not
        other draws of its weights.

    Raises:
        InputError: fewer than two places after the burn-in, or no floating-point input.
        CaptureError: the model raises, or an operation has no forward derivative.

    Example:
        >>> layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
        >>> for layer in layers:
        ...     _ = nn.init.orthogonal_(layer.weight, gain=2.0)
        >>> found = growth_exponent(nn.Sequential(*layers), torch.randn(5, 8))
        >>> round(found.growth.value, 6), found.phase
        (0.693147, 'chaos')

    Reference:
        Evolution of neural network, sections 2.6.3 and 2.6.4; the boundary is a mean exponent of
        zero, not an inequality at every step.
    """
    expect_arguments("growth_exponent", model=model)
    expect_numbers("growth_exponent", COUNT, directions=directions)
    expect_numbers("growth_exponent", SEED, seed=seed)
    expect_numbers("growth_exponent", SEED, or_none=True, burn_in=burn_in)
    twin = safe_deepcopy(model).double()
    layers, recurrent = _places(twin, names, types)
    generator = torch.Generator().manual_seed(seed)
    logs: list[Tensor] = []
    if at is None and recurrent is not None:
        at = (slice(None), 0) if recurrent.batch_first else 0
    for _ in range(directions):
        outputs = follow_tangents(twin, inputs, kwargs, layers, at, start, generator)
        if recurrent is not None:
            value = outputs[-1]
            outputs = list(value.movedim(1 if recurrent.batch_first and value.dim() > 2 else 0, 0))
        elif names is None and types is None:
            shapes = [value.shape for value in outputs]
            common = max(set(shapes), key=shapes.count)
            outputs = [value for value in outputs if value.shape == common]
        sizes = [value.flatten(1) if value.dim() > 1 else value[None] for value in outputs]
        if len({len(size) for size in sizes}) > 1:
            sizes = [size.reshape(1, -1) for size in sizes]
        logs.append(torch.stack([size.square().mean(1).sqrt().log() for size in sizes]))
    return exponent(torch.cat(logs, 1), burn_in)


def exponent(logs: Tensor, burn_in: int | None = None) -> Exponent:
    """Compute the exponent from logarithms of sizes.

    Args:
        logs: log RMS of perturbations, shape ``(places, perturbations)``.
        burn_in: number of steps left out at the start; by default a quarter of all.

    Returns:
        Slope between the first place after the burn-in and the last, with Student's
        interval over perturbations.
    """
    # the first state of a loop is zero, and no perturbation reaches it
    reached = logs.isfinite().any(1).nonzero()
    logs = logs[int(reached[0]) :] if len(reached) else logs
    places = logs.shape[0]
    skip = (places - 1) // 4 if burn_in is None else burn_in
    if places - skip < 2:
        raise InputError(
            f"growth_exponent found {places} places and a burn-in of {skip}, expected at least two"
            " places after it; choose more layers by names= or types=, or a longer sequence."
        )
    alive = logs.isfinite().all(0)
    died = int((~alive).sum())
    if not alive.any():
        return Exponent(
            Estimate(-math.inf, 0.0, 0), -math.inf, -math.inf, places - 1 - skip, died, ()
        )
    logs = logs[:, alive]
    slopes = (logs[-1] - logs[skip]) / (places - 1 - skip)
    growth = Estimate.of(slopes.tolist())
    return Exponent(
        growth, *growth.interval(), places - 1 - skip, died, tuple(logs.mean(1).tolist())
    )


def _places(
    model: nn.Module, names: Names, types: Types
) -> tuple[dict[str, nn.Module], nn.RNNBase | None]:
    if names is not None or types is not None:
        layers = select(model, names, types)
    else:
        kinds = (
            nn.RNNBase
            if any(isinstance(module, nn.RNNBase) for module in model.modules())
            else (*MATRICES, *_RECURRENT)
        )
        layers = {
            name: module for name, module in model.named_modules() if isinstance(module, kinds)
        }
        if not layers:
            raise InputError(
                "growth_exponent found no linear, convolutional or recurrent layer in"
                f" {type(model).__name__}; choose layers by names= or types=."
            )
    for name, module in reversed(layers.items()):
        if isinstance(module, nn.RNNBase):
            return {name: module}, module
    return layers, None


def redraw(
    model: nn.Module, scale: float, bias: float = 0.0, names: Names = None, seed: int = 0
) -> nn.Module:
    """A float64 copy with fresh weights of variance ``scale^2 / fan_in`` and
    biases of variance ``bias^2``.

    Args:
        model: any module.
        scale: scale of the weights.
        bias: standard deviation of the biases of layers that are redrawn.
        names: patterns of the parameter names of the matrices to redraw; by default the weights of
            linear and convolutional layers, and the recurrent matrices of recurrent ones.
        seed: seed of the draw; the same seed at another scale gives the
            same weights times a factor.

    Returns:
        The copy.

    Raises:
        InputError: no parameter matches.
    """
    expect_numbers("redraw", "a number of at least 0", scale=scale, bias=bias)
    expect_numbers("redraw", SEED, seed=seed)
    twin = safe_deepcopy(model).double()
    generator = torch.Generator().manual_seed(seed)
    wanted = matching(names)
    drawn = 0
    with torch.no_grad():
        for path, module in twin.named_modules():
            plain, recurrent = (isinstance(module, kind) for kind in (MATRICES, _RECURRENT))
            for full, parameter in module.named_parameters(path, recurse=False):
                name = full.rpartition(".")[2]
                known = plain or (recurrent and "_hh" in name)
                if parameter.dim() > 1 and (known if names is None else wanted(full)):
                    size = scale / math.sqrt(parameter[0].numel())
                    drawn += 1
                elif parameter.dim() == 1 and "bias" in name and (plain or recurrent):
                    size = bias
                else:
                    continue
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise * size)
    if not drawn:
        raise InputError(
            f"redraw found no weight matrix of {type(model).__name__} that matches {names!r}."
        )
    return twin


@dataclass(frozen=True)
class ScalePoint:
    """The growth exponent at one weight scale.

    Attributes:
        scale: weights have variance ``scale^2 / fan_in``.
        bias: standard deviation of biases.
        growth: mean exponent with its standard error over draws of the weights.
        low: lower end of the 95 % interval.
        high: upper end.
    """

    scale: float
    bias: float
    growth: Estimate
    low: float
    high: float


def sweep(
    model: nn.Module,
    scales: Sequence[float],
    *inputs: Any,
    biases: Sequence[float] = (0.0,),
    draws: int = 4,
    weights: Names = None,
    seed: int = 0,
    **options: Any,
) -> Table[ScalePoint]:
    """Measure the growth exponent for each weight scale (and bias scale), with
    several draws of all weights.

    Args:
        model: the architecture; its weights are not used.
        scales: weight scales.
        *inputs: one batch.
        biases: bias scales.
        draws: number of networks per point; all points have the same random numbers.
        weights: patterns of the matrices to redraw, see :func:`redraw`.
        seed: seed of the first draw.
        **options: options of :func:`growth_exponent`.

    Returns:
        One row per pair of scales.

    Example:
        >>> net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)])
        >>> points = sweep(net, [1.0, 2.0], torch.randn(4, 16), draws=2)
        >>> round(
        ...     points[1].growth.value - points[0].growth.value, 6
        ... )  # linear nets: log of the scale
        0.693147
    """
    expect_arguments("sweep", model=model)
    expect_numbers("sweep", COUNT, draws=draws)
    expect_numbers("sweep", SEED, seed=seed)
    rows = []
    for bias in _numbers("biases", biases):
        for scale in _numbers("scales", scales):
            found = [
                growth_exponent(
                    redraw(model, scale, bias, weights, seed + draw),
                    *inputs,
                    seed=seed + draw,
                    **options,
                )
                for draw in range(draws)
            ]
            growth = Estimate.of([one.growth.value for one in found])
            rows.append(ScalePoint(scale, bias, growth, *growth.interval()))
    return Table("growth exponent by weight scale", tuple(rows))


def _numbers(name: str, values: Sequence[float]) -> list[float]:
    """Check a list of numbers."""
    found = np.asarray(values)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "fiu":
        raise InputTypeError(f"sweep found {name}={values!r}, expected a list of numbers.")
    for value in found.tolist():
        expect_numbers("sweep", "a number of at least 0", **{name: value})
    return [float(value) for value in found]


@dataclass(frozen=True)
class CriticalPoint:
    """The weight scale at which the growth exponent changes sign.

    Attributes:
        scale: the critical weight scale; ``None`` if the range has only one phase.
        error: its standard error, from the spread over draws and the slope of the exponent.
        points: the measured scales.
        verdict: the result in a sentence.
    """

    scale: float | None
    error: float | None
    points: Table[ScalePoint]
    verdict: str


def critical_point(
    model: nn.Module,
    *inputs: Any,
    low: float = 0.2,
    high: float = 4.0,
    tolerance: float = 1e-3,
    bias: float = 0.0,
    **options: Any,
) -> CriticalPoint:
    """Find the critical weight scale by bisection on the mean exponent, with the same
    random numbers at all scales.

    For saturating activations (tanh) without biases the exponent grows only quadratically above the
    critical scale, and signals of order one decay to the zero state over many layers. Use small
    inputs (1e-3), so that the change of sign shows the stability of the zero state.

    Args:
        model: the architecture; its weights are not used.
        *inputs: one batch.
        low: a scale that should be ordered.
        high: a scale that should be chaotic.
        tolerance: relative width at which bisection stops.
        bias: standard deviation of biases.
        **options: options of :func:`sweep` and :func:`growth_exponent`.

    Returns:
        The critical point, or a verdict that the range has none.

    Raises:
        InputError: ``low`` is not below ``high``.
    """
    expect_numbers("critical_point", "a positive number", low=low, high=high, tolerance=tolerance)
    if not low < high:
        raise InputError(
            f"critical_point found low={low} and high={high}, expected 0 < low < high."
        )
    tried: list[ScalePoint] = []

    def at(scale: float) -> float:
        tried.append(sweep(model, [scale], *inputs, biases=[bias], **options)[0])
        return tried[-1].growth.value

    def result(scale: float | None, error: float | None, verdict: str) -> CriticalPoint:
        rows = tuple(sorted(tried, key=lambda point: point.scale))
        return CriticalPoint(scale, error, Table("growth exponent by weight scale", rows), verdict)

    ends, span = (at(low), at(high)), f"at every scale from {low:g} to {high:g}"
    if min(ends) > 0:
        return result(None, None, f"No ordered phase: perturbations grow {span}.")
    if max(ends) < 0:
        return result(None, None, f"No chaotic phase: perturbations shrink {span}.")
    if ends[0] > ends[1]:
        text = f"{ends[0]:.3g} at {low:g}, {ends[1]:.3g} at {high:g}"
        return result(None, None, f"Chaos below and order above: {text}.")
    a, b = low, high
    while b / a > 1 + tolerance:
        middle = math.sqrt(a * b)
        a, b = (middle, b) if at(middle) < 0 else (a, middle)
    scale = math.sqrt(a * b)
    slope = (at(scale * 1.02) - at(scale / 1.02)) / (scale * 1.02 - scale / 1.02)
    spread = max(tried[-1].growth.error, tried[-2].growth.error)
    error = math.hypot(spread / slope, (b - a) / 2) if slope > 0 else None
    shown = "?" if error is None else f"{error:.2g}"
    return result(
        scale, error, f"Critical at weight scale {scale:.4g} +- {shown}: order below, chaos above."
    )
