"""Convex functions of log-scales with largest entries in them: minimised, with a
lower bound on the minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from .largest_entries import Logs, Peaks, grouped

SHARPNESS = (8.0, 64.0, 512.0, 4096.0)
ROUNDS = 2
# steps for each problem: as many as look at so many entries together, within bounds
WORK, FEWEST, MOST = 300_000_000, 4, 600

Total = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Found:
    """Where a programme has its minimum: no log-scales have a value below ``bound``."""

    phi: np.ndarray
    before: float
    value: float
    bound: float
    steps: int


@dataclass(eq=False)
class Programme:
    """``total(peaks(phi), logs(phi))``, convex in both arguments and growing in the first.

    An evaluation of ``total`` costs as much as so many ``passes`` over all entries.
    """

    peaks: Peaks
    total: Total
    passes: int = 1

    @property
    def entries(self) -> int:
        """Entries that an evaluation looks at, at least the number of log-scales."""
        return self.scales.count + self.passes * sum(e.logs.numel() for e in self.peaks.entries)

    @property
    def scales(self) -> Logs:
        """Log-scales of all ids."""
        return self.peaks.scales

    def value(self, phi: np.ndarray) -> float:
        """The value with the true largest entries."""
        point = torch.from_numpy(phi)
        return float(self.total(self.peaks.exact(point), self.scales(point)))

    def smooth(self, phi: np.ndarray, sharpness: float) -> tuple[float, np.ndarray, float]:
        """A smooth value, its gradient, and by how much the tangent there may lie too high.

        A largest entry is at least any mean of the entries, which is affine in the log-scales.
        """
        with torch.enable_grad():
            point = torch.from_numpy(phi).requires_grad_()
            logs = self.scales(point)
            top, above = grouped(
                self.peaks.few(logs), self.peaks.group, self.peaks.count, sharpness
            )
            value = self.total(top, logs)
            # (nothing may depend on the log-scales, or on the largest entries)
            slope, share = torch.autograd.grad(value, [point, top], allow_unused=True)
        gradient = torch.zeros_like(point) if slope is None else slope
        return (
            float(value.detach()),
            gradient.numpy(),
            0.0 if share is None else float((share * above).sum()),
        )


def minimise_convex(
    programme: Programme,
    limit: float,
    tolerance: float,
    steps: int | None = None,
    floor: np.ndarray | None = None,
) -> Found:
    """The minimum over ``|phi| <= limit``, by smooth problems of growing sharpness."""
    phi = np.zeros(programme.scales.count)
    before = programme.value(phi)
    if not len(phi):
        return Found(phi, before, before, before, 0)
    best, bound, spent = (before, phi), -np.inf, 0
    least = np.full(len(phi), -limit) if floor is None else np.maximum(floor, -limit)
    most = MOST if programme.peaks.count else 10 * MOST
    each = max(FEWEST, min(steps or most, WORK // max(programme.entries, 1)))
    for sharpness in SHARPNESS if programme.peaks.count else SHARPNESS[:1]:
        for again in range(ROUNDS):
            if not programme.peaks.grow(torch.from_numpy(phi)) and again:
                break
            found = minimize(
                lambda at: programme.smooth(at, sharpness)[:2],  # noqa: B023
                phi,
                jac=True,
                method="L-BFGS-B",
                bounds=[(low, limit) for low in least.tolist()],
                options={"maxiter": each, "maxcor": 10, "ftol": 1e-14, "gtol": 1e-9},
            )
            phi, spent = found.x, spent + int(found.nfev)
            value, gradient, high = programme.smooth(phi, sharpness)
            lowest = np.minimum(gradient * (limit - phi), gradient * (least - phi)).sum()
            bound = max(bound, value - high + float(lowest))
            best = min(best, (programme.value(phi), phi), key=lambda pair: pair[0])
        if best[0] - bound <= tolerance:
            break
    return Found(best[1], before, best[0], min(bound, best[0]), spent)
