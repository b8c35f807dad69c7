"""The smallest norm over all gauge transformations: a geometric programme, convex
in the units' log-scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from .pairs import Pairs

STEPS = 500
INNER = 400
SWEEPS = 3
NEAR = 0.3
LARGEST_STEP = 20.0


@dataclass(frozen=True, eq=False)
class Minimum:
    """Where a programme has its minimum; ``imbalance`` is 0 there, relative to both sides."""

    phi: np.ndarray
    value: float
    imbalance: float
    steps: int


def minimise(
    pairs: Pairs,
    free: np.ndarray,
    tilt: np.ndarray,
    tolerance: float,
    start: np.ndarray | None = None,
) -> Minimum:
    """``min over phi of sum_e c_e exp(p (A phi)_e) - p tilt . phi``, 0 where it is not free.

    Far from the minimum all units move at once, each to the minimum of a separable upper bound:
    ``exp(p sum_k a_k d_k) <= sum_k |a_k| / S exp(p S sign(a_k) d_k) + const``. Newton's method,
    with conjugate gradients for its equations, finishes.
    """
    p, phi = pairs.p, np.zeros(len(free)) if start is None else start
    for step in range(STEPS):
        for sweep in range(1 + SWEEPS):
            entering, leaving, total = pairs.sides(phi)
            gradient = np.where(free, entering - leaving - tilt, 0.0)
            scale = entering + leaving + np.abs(tilt)
            uneven = gradient / np.where(scale > 0, scale, 1.0)
            worst = float(np.abs(uneven).max(initial=0.0))
            if worst <= tolerance:
                return Minimum(phi, total, worst, step)
            if worst < NEAR or sweep == SWEEPS:
                break
            phi = phi + np.where(free, separate(entering, leaving, tilt) / (p * pairs.width), 0.0)
        curvature = pairs.curvature(phi)
        found = total - p * float(tilt @ phi)
        direction = _solve(curvature, -gradient / p, scale, free, min(0.1, worst))
        slope = p * float(gradient @ direction)
        direction *= min(1.0, LARGEST_STEP / max(float(np.abs(direction).max(initial=0.0)), 1e-300))
        for _ in range(40):
            entering, leaving, total = pairs.sides(phi + direction)
            value = total - p * float(tilt @ (phi + direction))
            rest = np.where(free, entering - leaving - tilt, 0.0)
            # near the minimum the sum is too inexact to compare, but its derivative is not
            calmer = np.abs(rest / np.where(scale > 0, scale, 1.0)).sum() < np.abs(uneven).sum()
            if value <= found + 1e-4 * slope or calmer:
                break
            direction, slope = direction / 2, slope / 2
        phi = phi + direction
    raise InputError(
        f"balance found norms that still differ by {worst:.0e} after {STEPS} steps, expected"
        f" {tolerance:.0e}; ask for a larger tolerance."
    )


def separate(entering: np.ndarray, leaving: np.ndarray, tilt: np.ndarray) -> np.ndarray:
    """``log z`` with ``entering z - leaving / z = tilt``, 0 for units without edges."""
    root = np.sqrt(tilt**2 + 4 * entering * leaving)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(tilt >= 0, (tilt + root) / (2 * entering), 2 * leaving / (root - tilt))
        logs = np.log(z)
    return np.where(np.isfinite(logs), np.clip(logs, -600, 600), 0.0)


def _solve(
    curvature: Callable[[np.ndarray], np.ndarray],
    right: np.ndarray,
    scale: np.ndarray,
    free: np.ndarray,
    accuracy: float,
) -> np.ndarray:
    """Conjugate gradients for ``curvature x = right``, to a relative ``accuracy``."""
    from scipy.sparse.linalg import LinearOperator, cg  # slow to import

    inverse, shape = np.zeros(len(right)), 2 * right.shape
    np.divide(1.0, scale, out=inverse, where=free & (scale > 0))
    found: np.ndarray = cg(
        LinearOperator(shape, lambda x: np.where(free, curvature(np.ravel(x)), 0.0)),
        np.where(free, right, 0.0),
        rtol=accuracy,
        maxiter=INNER,
        M=LinearOperator(shape, lambda x: inverse * np.ravel(x)),
    )[0]
    return found
