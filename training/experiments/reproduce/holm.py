"""Verdicts by rule: no sentence about a result is written by hand.

A claim says that a quantity is positive, and how large the paper prints it. From paired differences over seeds follow
a 95 % interval and a p-value, corrected by Holm's method for the number of claims of the experiment. Then it is

* *confirmed* if the quantity is positive with a corrected p-value below 0.05;
* *not confirmed* if the interval lies wholly below what the paper prints, or wholly below zero;
* *inconclusive at this scale* otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

from pathspace.training.experiments.intervals import t_interval

Verdict = Literal["confirmed", "not confirmed", "inconclusive at this scale"]
LEVEL = 0.05


@dataclass(frozen=True)
class Claim:
    """A claim on trial.

    Args:
        statement: what is claimed, as a sentence.
        mean: mean of the claimed quantity.
        low: lower end of its 95 % interval.
        high: upper end.
        p: two-sided p-value of the quantity being zero.
        count: pairs behind it.
        printed: what the paper prints for the quantity, ``None`` if it prints none.
        pattern: how ``format`` writes the quantity.
        corrected: the p-value after Holm's correction.
        verdict: by the rule of this module.
    """

    statement: str
    mean: float
    low: float
    high: float
    p: float
    count: int
    printed: float | None = None
    pattern: str = "+.1%"
    corrected: float = math.nan
    verdict: Verdict = "inconclusive at this scale"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; NaN becomes ``None``."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


def gain(
    statement: str, ours: Sequence[float], rival: Sequence[float], printed: tuple[float, float] | None = None
) -> Claim:
    """Put "ours is lower than the rival's" on trial, as a share of the rival's mean: ``(rival - ours) / rival``.

    Args:
        statement: the claim.
        ours: one value per seed, lower is better; NaN for a seed that failed.
        rival: the same seeds.
        printed: the paper's two numbers, in the same order.

    Returns:
        The claim, not yet corrected for others.

    Example:
        >>> claim = gain("A errs less than B", [0.9, 0.8, 1.0], [2.0, 1.9, 2.1], (1.0, 2.0))
        >>> round(claim.mean, 3), claim.printed
        (0.55, 0.5)
    """
    pairs = [(a, b) for a, b in zip(ours, rival, strict=True) if math.isfinite(a) and math.isfinite(b)]
    scale = abs(float(np.mean([b for _, b in pairs]))) if pairs else math.nan
    share = None if printed is None else (printed[1] - printed[0]) / printed[1]
    return positive(statement, [(b - a) / scale if scale else 0.0 for a, b in pairs], share)


def positive(statement: str, values: Sequence[float], printed: float | None = None, pattern: str = "+.1%") -> Claim:
    """Put "this quantity is positive" on trial.

    Args:
        statement: the claim.
        values: one per seed or pair.
        printed: what the paper prints.
        pattern: how to write the quantity.

    Returns:
        The claim, not yet corrected for others.

    Example:
        >>> positive("growth", [1.0, 1.1, 0.9]).p < 0.01
        True
    """
    interval = t_interval(values)
    p = math.nan
    if interval.count > 1:
        error = float(np.std(values, ddof=1)) / math.sqrt(interval.count)
        # Without any spread there is nothing to divide by, and nothing left to doubt.
        degrees = interval.count - 1
        p = 2 * float(stats.t.sf(abs(interval.mean) / error, degrees)) if error else float(interval.mean == 0)
    low, high = interval.mean - interval.half_width, interval.mean + interval.half_width
    return Claim(statement, interval.mean, low, high, p, interval.count, printed, pattern)


def judge(claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Correct the p-values of an experiment's claims for their number (Holm), and give each its verdict.

    Args:
        claims: all claims of one experiment.

    Returns:
        The same claims, judged.

    Example:
        >>> good, bad = judge([positive("a", [1.0, 1.1, 0.9]), positive("b", [-1.0, -1.1, -0.9])])
        >>> good.verdict, bad.verdict
        ('confirmed', 'not confirmed')
    """
    order = sorted(range(len(claims)), key=lambda i: claims[i].p if math.isfinite(claims[i].p) else 1.0)
    corrected = [math.nan] * len(claims)
    largest = 0.0
    for rank, i in enumerate(order):
        p = claims[i].p if math.isfinite(claims[i].p) else 1.0
        largest = max(largest, min(1.0, (len(claims) - rank) * p))
        corrected[i] = largest
    return tuple(_judged(claim, p) for claim, p in zip(claims, corrected, strict=True))


def _judged(claim: Claim, p: float) -> Claim:
    verdict: Verdict = "inconclusive at this scale"
    if claim.count > 1:
        if claim.mean > 0 and p < LEVEL:
            verdict = "confirmed"
        elif claim.high < max(claim.printed or 0.0, 0.0):
            verdict = "not confirmed"
    return replace(claim, corrected=p, verdict=verdict)
