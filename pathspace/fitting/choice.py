"""Gauges that minimise an objective over all rescalings, with a bound that proves it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from scipy.sparse import csr_array, eye_array
from torch import Tensor, nn

from ..errors import SEED, InputTypeError, expect_arguments, expect_numbers
from ..gauge.balance import balancing
from ..gauge.pairs import Pairs
from ..gauge.rescale import expect_blocks
from ..graph.structure import LOG_2, Structure
from ..rotations.space import FeatureSpaces
from ..shown import Shown
from .basis_choice import ChosenBasis, choose_basis
from .convex import Logs, Peaks, Programme, minimise_convex
from .objectives import Balance, Noise, Objective, running_variances

# no unit is rescaled by more than this factor, unless it is asked for
LIMIT = 2.0**16
TOLERANCE = 1e-3
# segments on which a function of the user's own is checked
SEGMENTS = 8


@dataclass(frozen=True)
class GaugeCertificate(Shown):
    """The value of an objective in a gauge, with a proven lower bound.

    Attributes:
        objective: what was minimised.
        before: its value for the given model.
        after: its value in the chosen gauge.
        bound: no gauge that rescales every unit by ``limit`` at most, and leaves running variances
            the digits that they need, has a smaller value: the objective is convex, and lies above
            its tangent planes. Minus infinity for a function that turned out not to be convex.
        limit: the largest factor.
        at_limit: how many units have it: there the objective still falls.
        powers_of_two: whether all factors are powers of two, rounded from the minimum.
        steps: evaluations, or steps of Newton's method.
    """

    objective: str
    before: float
    after: float
    bound: float
    limit: float
    at_limit: int
    powers_of_two: bool
    steps: int

    @property
    def gap(self) -> float:
        """By how much the value can be above the minimum."""
        return self.after - self.bound

    def __str__(self) -> str:
        return (
            f"{self.objective}: {self.before:.6g} -> {self.after:.6g}, at most {self.gap:.1e} above"
            " the minimum"
        )


class Gauge(Tensor):
    """Log-scales of the units, ``(H,)``, with the certificate that they are a minimum.

    A tensor in every respect: ``ps.rescale_(model, graph, gauge)``. What is computed from
    it, and ``phi``, is an ordinary tensor.
    """

    certificate: GaugeCertificate

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is computed from it is an ordinary tensor."""
        return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]

    @property
    def phi(self) -> Tensor:
        """The log-scales alone."""
        return self.as_subclass(Tensor)


@overload
def choose_gauge(
    model: nn.Module,
    graph: FeatureSpaces,
    objective: Noise,
    calibration: Any,
    *,
    steps: int | None = None,
) -> ChosenBasis: ...


@overload
def choose_gauge(
    model: nn.Module,
    graph: Structure,
    objective: Objective | Balance | Callable[[Tensor], Tensor],
    calibration: Any = None,
    *,
    powers_of_two: bool = False,
    exact: bool = True,
    limit: float = LIMIT,
    tolerance: float = TOLERANCE,
    steps: int | None = None,
) -> Gauge: ...


def choose_gauge(
    model: nn.Module,
    graph: Structure | FeatureSpaces,
    objective: Objective | Balance | Callable[[Tensor], Tensor],
    calibration: Any = None,
    *,
    powers_of_two: bool = False,
    exact: bool = True,
    limit: float = LIMIT,
    tolerance: float = TOLERANCE,
    steps: int | None = None,
) -> Gauge | ChosenBasis:
    """The rescaling of a network that is best for an objective: a convex programme over the
    log-scales of its units; or the best matrices of its feature spaces.

    With the spaces of :func:`pathspace.spaces`, a descent over the matrices of all of them begins
    at Hadamard matrices. They are taken if the model is then better by more than chance on every
    third batch, which nothing was chosen on; else it stays as it was trained.

    Args:
        model: the model whose parameters ``graph`` holds, or a copy of it; it is not changed.
        graph: its reduction graph, or its feature spaces.
        objective: for feature spaces :class:`pathspace.Noise`, of weights, of what they are
            multiplied by (``activations``), or of both. For a graph one of
            :class:`pathspace.Balance`, :class:`pathspace.Range`, :class:`pathspace.Noise`,
            :class:`pathspace.ActivationRange`, :class:`pathspace.Smooth`,
            :class:`pathspace.Conditioning`, or a differentiable function of the log-scales
            ``(H,)``, to be minimised.
        calibration: typical batches: a tensor, a tuple of inputs, a mapping of keyword inputs, or
            an iterable of these. Objectives that need data use random inputs if none are given.
        powers_of_two: round the factors to powers of two, which multiply
            floating-point numbers exactly.
        exact: do not change units that are free only at ``eps = 0``
            (:func:`pathspace.balance_` changes all).
        limit: the largest factor.
        tolerance: how far above its minimum the objective may be; the
            certificate says what was reached.
        steps: of each of a sequence of smooth problems, at most; where there are many weights,
            fewer are taken. Of the descent over matrices, by default 100.

    Returns:
        The log-scales, with a ``certificate``; for feature spaces the elements for
        :func:`pathspace.rotate_`.

    Raises:
        InputError: no such objective, or the model or its calibration does not fit.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(4, 8), ReLU(), Linear(8, 2))
        >>> graph, x = ps.trace(model, torch.randn(1, 4)), torch.randn(64, 4)
        >>> gauge = ps.choose_gauge(model, graph, ps.Noise(bits=4), calibration=x)
        >>> gauge.certificate.gap < 0.01 and gauge.certificate.after <= gauge.certificate.before
        True
        >>> y = model(x)
        >>> torch.allclose(ps.rescale_(model, graph, gauge)(x), y, atol=1e-5)
        True
    """
    expect_numbers("choose_gauge", SEED, or_none=True, steps=steps)
    if isinstance(graph, FeatureSpaces):
        if not isinstance(objective, Noise):
            raise InputTypeError(
                f"choose_gauge found an objective of type {type(objective).__name__} for feature"
                " spaces, expected ps.Noise(bits=, activations=)."
            )
        return choose_basis(model, graph, objective, calibration, steps)
    expect_arguments("choose_gauge", model=model, graph=graph)
    expect_numbers("choose_gauge", "a number above 1", limit=limit)
    expect_numbers("choose_gauge", "a number from 0 to inf", tolerance=tolerance)
    expect_blocks("choose_gauge", model, graph)
    if isinstance(objective, Balance):
        basis, point, value, certificate = _balanced(model, graph, objective, limit)
    else:
        programme = _programme(model, graph, objective, calibration, exact)
        basis, value = programme.peaks.scales.basis, programme.value
        most, floor = math.log(limit), _floor(model, graph, basis)
        found = minimise_convex(programme, most, floor, tolerance, steps)
        point, before, after, bound, spent = found
        name, ends = str(objective), int((np.abs(point) > most * (1 - 1e-9)).sum())
        if not isinstance(objective, Objective):
            name = getattr(objective, "__name__", "a function")
            bound = bound if _is_convex(programme, point) else -math.inf
        certificate = GaugeCertificate(name, before, after, bound, limit, ends, False, spent)
    if powers_of_two:
        point = np.round(point / LOG_2) * LOG_2
        certificate = replace(certificate, after=value(point), powers_of_two=True)
    gauge = torch.from_numpy(basis @ point).as_subclass(Gauge)
    gauge.certificate = certificate
    return gauge


def _balanced(
    model: nn.Module, graph: Structure, objective: Balance, limit: float
) -> tuple[Any, np.ndarray, Callable[[np.ndarray], float], GaugeCertificate]:
    found = balancing(model, graph, objective.p)
    pairs = Pairs(graph, objective.p, dict(model.named_parameters(remove_duplicate=False)))
    phi = found.phi.numpy()
    widest = max(math.log(limit), float(np.abs(phi).max(initial=0.0)))
    # the derivative by each log-scale is at most the imbalance times what meets there,
    # ``width`` times the sum in all
    slack = objective.p * found.imbalance * pairs.width * found.after * 2 * widest
    values = found.before, found.after, found.after - slack
    certificate = GaugeCertificate(str(objective), *values, math.exp(widest), 0, False, found.steps)
    return eye_array(len(phi), format="csr"), phi, lambda point: pairs.sides(point)[2], certificate


def _floor(model: nn.Module, graph: Structure, basis: csr_array) -> np.ndarray:
    """The smallest log-scales at which running variances keep their digits."""
    units, logs, lowest = (part.numpy() for part in running_variances(model, graph))
    least, own = np.full(graph.num_units + 1, -np.inf), (units > 0) & (units <= graph.num_units)
    np.maximum.at(least, units[own], np.minimum(lowest - logs, 0)[own] / 2)
    # (units with a variable of their own)
    entries = basis.tocoo()
    alone = (np.diff(basis.indptr)[entries.row] == 1) & (entries.data == 1)
    floor = np.full(basis.shape[1], -np.inf)
    np.maximum.at(floor, entries.col[alone], least[entries.row[alone] + 1])
    return floor


def _programme(
    model: nn.Module, graph: Structure, objective: Any, calibration: Any, exact: bool
) -> Programme:
    if isinstance(objective, Objective):
        return objective.programme(model, graph, calibration, exact)
    if not callable(objective):
        raise InputTypeError(
            f"choose_gauge found an objective of type {type(objective).__name__}, expected one of"
            " Balance(), Range(), Noise(), ActivationRange(), Smooth(), Conditioning(), or a"
            " function of the log-scales."
        )

    def total(_top: Tensor, logs: Tensor) -> Tensor:
        value = objective(logs[1 : graph.num_units + 1])
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputTypeError(
                "The objective returned no single number as a tensor, expected a scalar tensor."
            )
        return value.double().reshape(())

    return Programme(Peaks(Logs(graph, exact)), total)


def _is_convex(programme: Programme, point: np.ndarray) -> bool:
    random = np.random.default_rng(0)
    for size in (0.1, 1.0) * SEGMENTS:
        one, two = (point + size * random.normal(size=point.shape) for _ in range(2))
        ends, middle = [programme.value(at) for at in (one, two)], programme.value((one + two) / 2)
        if middle > sum(ends) / 2 + 1e-9 * max(map(abs, ends)):
            return False
    return True
