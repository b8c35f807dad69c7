"""Confidence intervals of a mean over few seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

# Probability that an interval covers the true mean.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its confidence interval (NaN for fewer than two values)."""

    mean: float
    half_width: float
    count: int

    def show(self, pattern: str) -> str:
        """Write ``mean ± half width`` with a format pattern such as ``".1%"``."""
        if not self.count:
            return "–"
        text = format(self.mean, pattern)
        return (
            text if math.isnan(self.half_width) else f"{text} ± {format(self.half_width, pattern)}"
        )


def t_interval(values: Sequence[float]) -> Interval:
    """Return ``mean ± t s / sqrt(n)``, with Student's ``t`` of ``n - 1`` degrees."""
    count = len(values)
    if count == 0:
        return Interval(math.nan, math.nan, 0)
    mean = float(np.mean(values))
    if count == 1:
        return Interval(mean, math.nan, 1)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(mean, float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error, count)
