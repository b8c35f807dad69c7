"""Moving averages of gradients: remaining noise, stability limit, and choice of the decay."""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pathspace.errors import (
    InputError,
    UnsupportedError,
    expect_arguments,
    expect_numbers,
    first_line,
)

from ..shared.model_calls import call, differentiating, lost, pairs_of
from ..shared.unchanged import unchanged
from .gradients import Loss, gradients


def _decay(decay: float) -> float:
    if not 0 <= decay < 1:
        raise InputError(
            f"A moving average found decay={decay}, expected 0 <= decay < 1; at 1 it would never"
            " change."
        )
    return decay


def stationary_variance(decay: float) -> float:
    """``(1 - decay) / (1 + decay)``: the share of the noise that remains after a moving average.

    It is the variance of ``g_t = decay g_{t-1} + (1 - decay) x_t`` over
    that of independent ``x_t``.

    Args:
        decay: between 0 and 1.

    Returns:
        The factor.

    Raises:
        InputError: decay outside [0, 1).

    Example:
        >>> round(stationary_variance(0.9), 4)
        0.0526
    """
    return (1 - _decay(decay)) / (1 + decay)


def average_weight(decay: float, steps: int) -> float:
    """Sum of the weights of the first ``steps`` values in a moving average started at
    zero: ``1 - decay^steps``.

    Example:
        >>> round(average_weight(0.9, 7), 2)
        0.52
    """
    return 1 - _decay(decay) ** steps


def sampling_factor(batch: int, population: int | None = None) -> float:
    """Variance of a mini-batch mean over that of one sample: ``1/B``, times ``(D - B) / (D -
    1)`` without replacement.

    Args:
        batch: batch size B.
        population: number of samples D; ``None`` for sampling with replacement.

    Returns:
        The factor.

    Raises:
        InputError: a batch larger than the population, or empty.

    Example:
        >>> sampling_factor(100), round(sampling_factor(100, 200), 5)
        (0.01, 0.00503)
    """
    if batch < 1 or (population is not None and batch > population):
        raise InputError(
            f"sampling_factor found batch={batch} and population={population}, expected 1 <= batch"
            " <= population."
        )
    return (
        1 / batch if population is None else (population - batch) / max(population - 1, 1) / batch
    )


def stability_limit(decay: float, curvature: float) -> float:
    """Largest stable learning rate of the moving average on a quadratic: ``2 (1 +
    decay) / ((1 - decay) h)``.

    Args:
        decay: decay of the moving average of gradients.
        curvature: h, the largest eigenvalue of the Hessian.

    Returns:
        The limit; it grows with the decay.

    Raises:
        InputError: curvature not positive.

    Example:
        >>> [round(stability_limit(decay, 1.0), 9) for decay in (0, 0.5, 0.9, 0.99)]
        [2.0, 6.0, 38.0, 398.0]
    """
    expect_numbers("stability_limit", "a positive number", curvature=curvature)
    return 2 * (1 + _decay(decay)) / ((1 - decay) * curvature)


def monotone_limit(decay: float, curvature: float) -> float:
    """Largest learning rate without oscillation on a quadratic: ``(1 - sqrt(decay)) /
    ((1 + sqrt(decay)) h)``.

    Above it the roots are complex and the loss sometimes increases; this, not stability, is
    the cost of a large decay.

    Example:
        >>> monotone_limit(0.0, 1.0), round(monotone_limit(0.81, 1.0), 4)
        (1.0, 0.0526)
    """
    expect_numbers("monotone_limit", "a positive number", curvature=curvature)
    root = math.sqrt(_decay(decay))
    return (1 - root) / ((1 + root) * curvature)


def contraction(decay: float, lr: float, curvature: float) -> float:
    """Factor per step by which the moving average approaches the minimum of ``h
    x^2 / 2``, for many steps.

    The larger modulus of the roots of ``r^2 - (1 + decay - (1 - decay) lr h) r + decay``.

    Example:
        >>> contraction(0.0, 0.5, 1.0), contraction(0.5, 6.0, 1.0)
        (0.5, 1.0)
    """
    trace = 1 + _decay(decay) - (1 - decay) * lr * curvature
    root = cmath.sqrt(trace**2 - 4 * decay)
    return max(abs(trace + root), abs(trace - root)) / 2


@dataclass(frozen=True)
class QuadraticRun:
    """The moving average run on a quadratic.

    Attributes:
        diverged: whether the distance to the minimum grew over the second half.
        ascents: steps on which the loss rose.
        steps: steps taken.
        distance: final distance over the initial one.
    """

    diverged: bool
    ascents: int
    steps: int
    distance: float


def quadratic_probe(
    decay: float, lr: float, curvature: float = 1.0, steps: int = 300
) -> QuadraticRun:
    """Run ``g <- decay g + (1 - decay) h x``, ``x <- x - lr g`` from ``x = 1, g = 0``.

    Args:
        decay: decay of the moving average.
        lr: learning rate.
        curvature: h.
        steps: number of steps.

    Returns:
        Divergence, ascents and final distance.

    Example:
        >>> quadratic_probe(0.9, 37.0).diverged, quadratic_probe(0.9, 39.0).diverged
        (False, True)
    """
    x, g, sizes, losses = 1.0, 0.0, [1.0], [0.5 * curvature]
    for _ in range(steps):
        g = _decay(decay) * g + (1 - decay) * curvature * x
        x -= lr * g
        sizes.append(math.hypot(x, lr * g))
        losses.append(0.5 * curvature * x * x)
        if not math.isfinite(x) or abs(x) > 1e100:
            break
    half = len(sizes) // 2
    grew = max(sizes[half + half // 2 :]) > max(sizes[half : half + half // 2 + 1])
    ascents = sum(b > a for a, b in itertools.pairwise(losses))
    return QuadraticRun(bool(grew), ascents, len(sizes) - 1, abs(x))


def curvature(model: nn.Module, loss: Loss, inputs: Any, targets: Any, seed: int = 0) -> float:
    """The largest eigenvalue of the loss's Hessian for all parameters, from
    Hessian-vector products (Lanczos).

    Args:
        model: any module.
        loss: ``loss(output, target)``.
        inputs: one batch.
        targets: passed to ``loss``.
        seed: seed of the start vector.

    Returns:
        The eigenvalue (algebraically largest).

    Raises:
        UnsupportedError: an operation of the model has no second derivative, or its
            gradients are not finite.

    Example:
        >>> model = nn.Linear(2, 1, bias=False).double()
        >>> x = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double()
        >>> round(curvature(model, lambda y, t: (y**2).sum() / 2, x, None), 9)
        4.0
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError(f"{type(model).__name__} has no trainable parameter for a curvature.")
    size = sum(parameter.numel() for parameter in parameters)

    def undefined(why: str) -> UnsupportedError:
        name = type(model).__name__
        return UnsupportedError(f"The curvature of {name} cannot be computed, because {why}.")

    # the fused attention kernels have no second derivatives
    with unchanged(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        value = lost(loss, call(model, inputs), targets)
        with differentiating(model):
            slopes = torch.autograd.grad(
                value, parameters, create_graph=True, materialize_grads=True
            )
        flat = torch.cat([slope.reshape(-1) for slope in slopes])
        if not bool(flat.isfinite().all()):
            raise undefined("its gradients are not finite")

        def product(vector: np.ndarray) -> np.ndarray:
            if not flat.requires_grad:
                return np.zeros(size)
            direction = torch.from_numpy(np.ascontiguousarray(vector).reshape(-1)).to(flat)
            try:
                found = torch.autograd.grad(
                    flat, parameters, direction, retain_graph=True, materialize_grads=True
                )
            except RuntimeError as error:
                why = f"an operation has no second derivative: {first_line(error)}"
                raise undefined(why) from error
            row = np.concatenate(
                [part.detach().reshape(-1).double().cpu().numpy() for part in found]
            )
            if not np.isfinite(row).all():
                raise undefined("its second derivatives are not finite")
            return row

        if size <= 40:
            matrix = np.stack([product(row) for row in np.eye(size)])
            return float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])
        operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
        start = np.random.default_rng(seed).normal(size=size)
        if not product(start).any():
            # (a loss that is linear in the weights)
            return 0.0
        try:
            return float(
                eigsh(operator, k=1, which="LA", v0=start, tol=1e-6, return_eigenvectors=False)[0]
            )
        except ArpackNoConvergence as error:
            best = (
                error.eigenvalues[-1]
                if len(error.eigenvalues)
                else start @ product(start) / (start @ start)
            )
            return float(best)


@dataclass(frozen=True)
class DecayAdvice:
    """A decay for the moving average of gradients, from measured noise.

    Attributes:
        signal: estimated ``|E g|^2`` of the mini-batch gradient of all parameters.
        noise: its total variance between batches.
        ratio: wanted ratio of noise to signal after averaging.
        decay: the smallest decay with this ratio.
        averaged_noise: ``noise (1 - decay) / (1 + decay)``.
        curvature: largest eigenvalue of the Hessian on the first batch; ``None`` if not
            requested or not defined.
        stable_lr: stability limit of the learning rate for this decay.
        monotone_lr: limit of the learning rate without oscillation.
        advice: the suggestion in a sentence, with the reason if the curvature is not defined.
    """

    signal: float
    noise: float
    ratio: float
    decay: float
    averaged_noise: float
    curvature: float | None
    stable_lr: float | None
    monotone_lr: float | None
    advice: str


def suggest_decay(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[tuple[Any, Any]],
    ratio: float = 1.0,
    most: float = 0.999,
    probe_curvature: bool = True,
) -> DecayAdvice:
    """Suggest the decay at which the averaged noise is ``ratio`` times the signal.

    It is ``(1 - q) / (1 + q)`` with ``q = ratio signal / noise``.

    Args:
        model: any module.
        loss: ``loss(output, target)``.
        batches: at least two mini-batches.
        ratio: wanted ratio of noise to signal.
        most: largest decay to suggest.
        probe_curvature: also find the largest eigenvalue of the Hessian on the first batch.

    Returns:
        The suggestion with its measurements.

    Raises:
        InputError: fewer than two batches, or ``ratio`` not positive.
        UnsupportedError: gradients that are not finite.

    Reference:
        Evolution of neural network, section 2.2.4; the stable learning rate increases with the
        decay, the monotone one decreases.
    """
    expect_arguments("suggest_decay", model=model, loss=loss)
    expect_numbers("suggest_decay", "a positive number", ratio=ratio)
    expect_numbers("suggest_decay", "a number between 0 and 1", most=most)
    batches = list(pairs_of("suggest_decay", batches))
    if len(batches) < 2:
        raise InputError(
            f"suggest_decay found {len(batches)} batches, expected at least two batches: noise is"
            " what differs between them."
        )
    table = gradients(model, loss, batches)
    noise = signal = 0.0
    for row in table:
        count = math.prod(row.shape)
        noise += count * (row.noise or 0.0)
        signal += count * (row.rms**2 - (row.noise or 0.0) / len(batches))
    if not math.isfinite(signal + noise):
        raise UnsupportedError(
            f"suggest_decay: gradients of {type(model).__name__} are not finite on these batches,"
            " so they have no noise."
        )
    signal = max(signal, 0.0)
    q = ratio * signal / noise if noise else math.inf
    decay = min(max((1 - q) / (1 + q), 0.0) if math.isfinite(q) else 0.0, most)
    missing = ""
    try:
        top = curvature(model, loss, *batches[0]) if probe_curvature else None
    except UnsupportedError as error:
        top, missing = None, f" {error}"
    positive = top if top is not None and top > 0 else None
    if decay == 0:
        advice = (
            "No averaging is needed: the noise of one batch is below the wanted share of the"
            " signal."
        )
    elif decay == most:
        advice = (
            f"The noise drowns the signal: even a decay of {most} is not enough; use larger batches"
            " or a smaller learning rate."
        )
    else:
        advice = f"A decay of {decay:.3g} averages the noise down to {ratio:g} times the signal."
    return DecayAdvice(
        signal,
        noise,
        ratio,
        decay,
        noise * stationary_variance(decay),
        top,
        None if positive is None else stability_limit(decay, positive),
        None if positive is None else monotone_limit(decay, positive),
        advice + missing,
    )
