"""Objectives for the choice of a gauge, each a convex function of the log-scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError, expect_numbers
from ..gauge.pairs import MatrixLayout, at
from ..graph.structure import Structure
from ..models.inputs import made_up
from ..paths.norms import path_sensitivity
from .activation_statistics import activation_sizes
from .calibration import Calibrated
from .convex import Logs, Peaks, Programme
from .quantise import check_format, weight_axes

# what the logarithm of every weight costs, in passes over all of them
PASSES = 4
# relative error that the rounding of running variances may make
ROUNDED = 1e-6


@dataclass(frozen=True)
class Balance:
    """``sum |w|^p``: :func:`pathspace.balance_`.

    Attributes:
        p: which norm.
    """

    p: float = 2.0


@dataclass(frozen=True)
class Noise:
    """Noise in the outputs from quantised weights, to first order.

    ``sum over tensors of max |w|^2 sum_e s_e``: rounding to steps of ``max |w| / (2^(bits - 1) -
    1)`` moves every weight by an error of variance ``step^2 / 12``, which the outputs feel by
    ``s_e = E |df/dw_e|^2``.

    Attributes:
        bits: of each weight; they scale the value, not the gauge. For feature spaces ``None``
            leaves weights as they are.
        activations: for feature spaces, bits of what is multiplied by the weights, with one step
            for each row (token).
        per: one step for each ``"tensor"`` or ``"channel"``.
    """

    bits: int | None = 8
    per: str = "tensor"
    activations: int | None = None

    def programme(
        self, model: nn.Module, graph: Structure, calibration: Any = None, exact: bool = True
    ) -> Programme:
        """The function of the log-scales; without calibration, on inputs made up."""
        if self.bits is None or self.activations is not None:
            raise InputError(
                f"Noise found bits={self.bits} and activations={self.activations} for a graph,"
                " expected bits of weights alone; rounded activations need ps.spaces(model, x) in"
                " place of the graph."
            )
        check_format(self.bits, self.per)
        held = calibrated(model, graph, calibration)
        peaks = weight_peaks(model, graph, exact, self.per, held.sensitivity())
        step = -math.log(12 * (2 ** (self.bits - 1) - 1) ** 2)
        return Programme(
            peaks, lambda top, logs: torch.logsumexp(2 * top + peaks.sums(logs, -2.0), 0) + step
        )


@dataclass(frozen=True)
class Range:
    """Bits that small weights lose below the step of a quantiser, on average; needs no data.

    ``mean of log2(1 + (step / |w|)^2) / 2`` with the step of the weight's tensor or channel: next
    to nothing for a weight of many steps, and ``log2(step / |w|)`` for one that is rounded to 0.

    Attributes:
        bits: of each weight.
        per: one step for each ``"tensor"`` or ``"channel"``.
    """

    bits: int = 8
    per: str = "tensor"

    def programme(
        self, model: nn.Module, graph: Structure, calibration: Any = None, exact: bool = True
    ) -> Programme:
        """The function of the log-scales, which needs no data."""
        del calibration
        check_format(self.bits, self.per)
        peaks = weight_peaks(model, graph, exact, self.per)
        levels = math.log(2 ** (self.bits - 1) - 1)
        count = sum(int(entry.logs.isfinite().sum()) for entry in peaks.entries)

        def total(top: Tensor, logs: Tensor) -> Tensor:
            value = top.sum() * 0
            for entry in peaks.entries:
                largest = top[entry.groups].unsqueeze(1 if entry.layout.by_row else 0)
                lacking = largest - levels - entry.moved(logs)
                # (in single precision, because there are as many as weights; zeros lack nothing)
                steps = lacking.float().masked_fill(~entry.logs.isfinite(), -torch.inf)
                value = value + F.softplus(2 * steps).sum(dtype=torch.float64)
            return value / (2 * math.log(2) * max(count, 1))

        return Programme(peaks, total, PASSES)


@dataclass(frozen=True)
class ActivationRange:
    """Activations and weights in the middle of the range of a floating point type.

    ``log(sum over free scales of (h a / largest)^2 + (h tiny / r)^2 + sum over tensors that the
    gauge moves of (h max |w| / largest)^2)`` with the largest activation ``a`` of a scale, the root
    mean square ``r``, and the headroom ``h``; running variances ``v`` add ``h v / largest``.

    Attributes:
        dtype: the type.
        headroom: how far inside its range everything is to be.
    """

    dtype: torch.dtype = torch.float16
    headroom: float = 4.0

    def programme(
        self, model: nn.Module, graph: Structure, calibration: Any = None, exact: bool = True
    ) -> Programme:
        """The function of the log-scales; without calibration, on inputs made up."""
        if not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise InputError(
                f"dtype is {self.dtype!r}, expected a floating point type such as torch.float16."
            )
        expect_numbers("ActivationRange", "a number of at least 1", headroom=self.headroom)
        sizes = activation_sizes(graph, calibrated(model, graph, calibration))
        kind, margin = torch.finfo(self.dtype), math.log(self.headroom)
        peaks = weight_peaks(model, graph, exact, "moved")
        # (fixed scales outside of the range would hide all others)
        moving = sizes.ids != 0
        ids = torch.from_numpy(sizes.ids[moving])
        high = torch.from_numpy(sizes.largest[moving]).log() + margin - math.log(kind.max)
        low = math.log(kind.tiny) + margin - torch.from_numpy(sizes.rms[moving]).log()

        units, spread, _ = running_variances(model, graph)
        spread = spread + margin - math.log(kind.max)

        def total(top: Tensor, logs: Tensor) -> Tensor:
            scale = at(logs, ids)
            parts = [2 * (high + scale), 2 * (low - scale), 2 * (top + margin - math.log(kind.max))]
            terms = torch.cat([*parts, spread + 2 * at(logs, units)])
            return torch.logsumexp(terms, 0) if len(terms) else terms.sum()

        return Programme(peaks, total)


@dataclass(frozen=True)
class Smooth:
    """Activations that are easy to quantise at the cost of weights:
    SmoothQuant, for all units at once.

    ``sum over units of a^alpha / alpha + w^(1 - alpha) / (1 - alpha)`` with the largest activation
    ``a`` and the largest weight ``w`` that leaves the unit. Where the units that read it stay as
    they are, the minimum is at SmoothQuant's factor ``max |x|^alpha / max |w|^(1 - alpha)``.

    Attributes:
        alpha: how much of the range moves from activations to weights, between 0 and 1.

    Reference:
        Xiao et al.: SmoothQuant (2023).
    """

    alpha: float = 0.5

    def programme(
        self, model: nn.Module, graph: Structure, calibration: Any = None, exact: bool = True
    ) -> Programme:
        """The function of the log-scales; without calibration, on inputs made up."""
        expect_numbers("Smooth", "a number between 0 and 1", alpha=self.alpha)
        sizes = activation_sizes(graph, calibrated(model, graph, calibration))
        peaks = weight_peaks(model, graph, exact, "tail")
        ids, alpha, beta = torch.from_numpy(sizes.ids), self.alpha, 1 - self.alpha
        # units that are both written and read, by weights other than 0
        met = peaks.exact(torch.zeros(peaks.scales.ids, dtype=torch.float64)) > -torch.inf
        read = (ids != 0) & (met[ids.abs()] if len(met) else False)
        largest, ids = torch.from_numpy(sizes.largest).log()[read], ids[read]
        live = ids.abs().unique()

        def total(top: Tensor, logs: Tensor) -> Tensor:
            activations = alpha * (largest + at(logs, ids)) - math.log(alpha)
            return torch.logsumexp(torch.cat([activations, beta * top[live] - math.log(beta)]), 0)

        return Programme(peaks, total)


@dataclass(frozen=True)
class Conditioning:
    """The path-conditioned gauge: the kernel of path values as near to a multiple of the
    identity as rescaling gets.

    ``log sum_e g_e - mean_e log g_e`` (up to a constant, the Bregman divergence of the
    diagonal) with the sum ``g_e`` over all paths through weight ``e`` of the squared product of
    their other weights; with calibration batches, the sensitivity ``E |df/dw_e|^2`` of the
    outputs takes its place.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(2, 3), ReLU(), Linear(3, 1))
        >>> graph = ps.trace(model, torch.randn(1, 2))
        >>> found = ps.choose_gauge(model, graph, ps.Conditioning()).certificate
        >>> found.after <= found.before and found.gap < 1e-3
        True

    Reference:
        Lebeurrier, Vayer, Gribonval: Path-conditioned training (2026).
    """

    def programme(
        self, model: nn.Module, graph: Structure, calibration: Any = None, exact: bool = True
    ) -> Programme:
        """The function of the log-scales."""
        if calibration is None:
            own = {name: p for name, p in model.named_parameters() if name in graph.index}
            felt: Mapping[str, Tensor] = path_sensitivity(graph, own)
        else:
            felt = calibrated(model, graph, calibration).sensitivity()
        peaks, log_sums, counts = Peaks(Logs(graph, exact)), 0.0, []
        for block in graph.blocks:
            layout, here = MatrixLayout(block.tail, block.head, block.shape), felt[block.name]
            sizes = torch.zeros(len(layout.head), len(layout.tail))
            peaks.add(layout, sizes, layout.matrix(here, largest=False))
            counts.append(layout.matrix((here > 0).double(), largest=False))
            log_sums += float(here[here > 0].log().sum())
        number = max(sum(float(count.sum()) for count in counts), 1.0)

        def total(_top: Tensor, logs: Tensor) -> Tensor:
            change = logs.sum() * 0
            for entry, count in zip(peaks.entries, counts, strict=True):
                up, down = entry.layout.ends(logs)
                change = change + count.sum(1) @ up - count.sum(0) @ down
            return torch.logsumexp(peaks.sums(logs, -2.0), 0) + (2 * change - log_sums) / number

        return Programme(Peaks(peaks.scales), total)


Objective = Noise | Range | ActivationRange | Smooth | Conditioning


def calibrated(model: nn.Module, graph: Structure, calibration: Any) -> Calibrated:
    """A model with its calibration batches, or with inputs made up."""
    if calibration is None:
        calibration = made_up(model, graph.captured.examples())
    return calibration if isinstance(calibration, Calibrated) else Calibrated(model, calibration)


def weight_peaks(
    model: nn.Module,
    graph: Structure,
    exact: bool,
    per: str,
    felt: Mapping[str, Tensor] | None = None,
) -> Peaks:
    """Largest entries of quantised weights, or of all tensors that the gauge moves where they are
    taken per ``"moved"`` tensor; ``felt`` are weights of their squares.
    """
    peaks, axes, ends = Peaks(Logs(graph, exact)), weight_axes(model), graph.whole_ends
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for block in graph.blocks:
        name, own = block.name, parameters[block.name].detach()
        kept = name in axes
        if per == "moved":
            moving = bool(block.head.any()) or bool(block.tail.any())
            kept = moving and own.is_floating_point() and own.numel() > 0
        # (of a shifted tensor not the tensor scales, but its sum with a constant)
        if not kept or name in graph.shifts:
            continue
        layout = MatrixLayout(*ends[name], block.shape, axes[name] if per == "channel" else None)
        if per == "tail":
            layout.group_by_tail()
        size, weights = own.cpu().double().abs(), None
        if felt is not None:
            weights = layout.matrix(torch.where(size > 0, felt[name], 0), largest=False)
        peaks.add(layout, layout.matrix(size, largest=True), weights, shared=per == "tail")
    return peaks


def running_variances(model: nn.Module, graph: Structure) -> tuple[Tensor, Tensor, Tensor]:
    """Running variances that move: ids of the channels, ``log(var + eps)``, and the smallest such
    logarithm at which ``s^2 (var + eps) - eps`` keeps digits of the variance.
    """
    none = torch.zeros(0, dtype=torch.float64)
    units, logs, least = [none.long()], [none], [none]
    buffers = dict(model.named_buffers())
    for entry in graph.statistics:
        if entry.var in buffers:
            buffer = buffers[entry.var].detach().cpu()
            sums = buffer.double().reshape(-1) + entry.eps
            lowest = torch.finfo(buffer.dtype).eps / ROUNDED * entry.eps
            units.append(entry.units.expand(buffer.shape).reshape(-1))
            logs.append(sums.clamp_min(1e-300).log())
            least.append(torch.full_like(sums, lowest).log())
    return torch.cat(units), torch.cat(logs), torch.cat(least)
