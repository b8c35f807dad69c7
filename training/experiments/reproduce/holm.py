"""Verdicts about claims, computed by a rule from the results of all seeds.

A claim states that a quantity is positive. Three tests of its values over seeds give the verdict:

* *better* or *worse* if the quantity differs from zero: Student's t-test, two-sided;
* *no difference that matters* otherwise, if it lies between minus and plus the margin, the paper's
  effect or 0.05: two one-sided t-tests;
* *undecided* otherwise, with the number of seeds that decide it with a probability of 80 %.

P-values of each kind are corrected by Holm's method for the number of claims of the experiment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ..intervals import CONFIDENCE, t_interval

Grid = NDArray[np.float64]
Verdict = Literal["better", "worse", "no difference that matters", "undecided"]
LEVEL, POWER, MARGIN = 0.05, 0.8, 0.05


@dataclass(frozen=True)
class Claim:
    """A claim with its statistics and its verdict.

    ``printed`` is what the paper prints for the quantity; ``corrected`` and ``equivalence`` are the
    p-values of both tests after Holm's correction; ``nothing`` says why the runs decide nothing;
    ``needed`` are the seeds of :func:`seeds_for_margin`, or those that the measured effect needs.
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
    verdict: Verdict = "undecided"
    nothing: str = ""
    equivalence: float = math.nan
    needed: int | None = None
    items_low: float = math.nan
    items_high: float = math.nan

    @property
    def margin(self) -> float:
        """The size from which on the quantity matters."""
        return abs(self.printed or MARGIN)

    @property
    def error(self) -> float:
        """Standard error of the mean, NaN for fewer than two values."""
        return (
            (self.high - self.low) / 2 / float(stats.t.ppf((1 + CONFIDENCE) / 2, self.count - 1))
            if self.count > 1
            else math.nan
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Claim:
        """Read plain values, without numbers that are not finite."""
        unknown = dict.fromkeys(
            ("mean", "low", "high", "p", "corrected", "equivalence", "items_low", "items_high"),
            math.nan,
        )
        return cls(**(values | {k: nan for k, nan in unknown.items() if values.get(k) is None}))


def gain(
    statement: str,
    ours: Sequence[float],
    rival: Sequence[float],
    printed: tuple[float, float] | None = None,
    failed: float = 1.0,
) -> Claim:
    """Test the claim "ours is lower than the rival's" with ``(rival - ours) / rival``, a share of
    the rival's mean, seed by seed. A NaN is a seed that failed, which counts as ``failed``; an arm
    that fails more often than the other is never the better one.
    """
    first, second = np.array(ours, dtype=float), np.array(rival, dtype=float)
    lost = int(np.isnan(first).sum() - np.isnan(second).sum())
    first, second = (np.where(np.isnan(values), failed, values) for values in (first, second))
    scale = abs(float(second.mean())) if len(second) else math.nan
    share = None if printed is None else (printed[1] - printed[0]) / printed[1]
    claim = positive(statement, ((second - first) / scale if scale else 0 * first).tolist(), share)
    if lost * claim.mean > 0:
        return replace(claim, nothing="the arm with the better mean failed more often")
    return claim


def positive(
    statement: str, values: Sequence[float], printed: float | None = None, pattern: str = "+.1%"
) -> Claim:
    """Test the claim "this quantity is positive" alone, with a value per seed or pair."""
    interval = t_interval(values)
    low, high = interval.mean - interval.half_width, interval.mean + interval.half_width
    claim = Claim(statement, interval.mean, low, high, math.nan, interval.count, printed, pattern)
    return replace(claim, p=2 * _tail(abs(claim.mean), claim))


def over_items(claim: Claim, values: Grid) -> Claim:
    """Add the interval for other seeds and other test items: the seeds of a claim share one test
    split.

    For values of ``S`` seeds and ``K`` parts of the test split, the variance of their mean is
    estimated as ``var_s / S + var_k / K - var_r / (S K)``, at least ``var_s / S``: of the seeds'
    means, of the parts' means, and of what is left without both, which the first two count twice
    (Cameron, Gelbach and Miller, Robust inference with multiway clustering, 2011). Student's
    distribution has ``min(S, K) - 1`` degrees of freedom. Without values, of shape (S, K), the
    claim stays.
    """
    if min(values.shape) < 2 or not np.isfinite(values).all():
        return claim
    seeds, parts = values.shape
    by_seed, by_part = values.mean(1, keepdims=True), values.mean(0, keepdims=True)
    rest = np.square(values - by_seed - by_part + values.mean()).sum() / ((seeds - 1) * (parts - 1))
    alone = by_seed.var(ddof=1) / seeds
    variance = max(alone, alone + by_part.var(ddof=1) / parts - rest / (seeds * parts))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, min(seeds, parts) - 1) * math.sqrt(variance))
    return replace(claim, items_low=claim.mean - half, items_high=claim.mean + half)


def judge(claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Correct the p-values of claims for their number (Holm); give each its verdict."""
    differs = holm([claim.p for claim in claims])
    equal = holm([_tail(claim.margin - abs(claim.mean), claim) for claim in claims])
    judged = []
    for claim, p, q in zip(claims, differs, equal, strict=True):
        verdict: Verdict = "undecided"
        if not claim.nothing and p < LEVEL:
            verdict = "better" if claim.mean > 0 else "worse"
        elif not claim.nothing and q < LEVEL:
            verdict = "no difference that matters"
        needed = seeds_for_margin(claim, len(claims))
        if verdict == "undecided" and not claim.nothing and needed and needed <= claim.count:
            # The effect lies between zero and the margin: it is told from the farther of them.
            effect = max(abs(claim.mean), claim.margin - abs(claim.mean))
            needed = seeds_needed(claim.error * math.sqrt(claim.count), effect, len(claims))
        judged.append(replace(claim, corrected=p, equivalence=q, verdict=verdict, needed=needed))
    return tuple(judged)


def holm(values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's method; one that is not known counts as 1."""
    p = np.nan_to_num(np.array(values, dtype=float), nan=1.0)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1, np.maximum.accumulate(np.arange(len(p), 0, -1) * p[order]))
    return [float(value) for value in corrected]


def seeds_needed(deviation: float, effect: float, claims: int = 1) -> int:
    """Return the number of seeds that decide a claim with a probability of 80 %, with or without an
    effect (Julious, Sample sizes for clinical trials, chapters 3 and 5).

    ``deviation`` is that of the quantity over seeds, ``effect`` its size if it is there, and the
    margin. By the noncentral t-distribution, at the level that Holm's method gives the first of so
    many claims.
    """
    level = LEVEL / claims
    normal = stats.norm.isf
    per_deviation = max(
        normal(level / 2) + normal(1 - POWER), normal(level) + normal((1 - POWER) / 2)
    )
    n = max(2, math.ceil((per_deviation * deviation / effect) ** 2))

    def enough(n: int) -> bool:
        centre = effect / deviation * math.sqrt(n)
        two_sided, one_sided = stats.t.isf([level / 2, level], n - 1)
        found, none = stats.nct.sf([two_sided, one_sided], n - 1, centre)
        return bool(found >= POWER and 2 * none - 1 >= POWER)

    # the normal distribution gives too small a number if it is small
    while n < 1000 and deviation > 0 and not enough(n):
        n += 1
    return int(n)


def seeds_for_margin(claim: Claim, claims: int) -> int | None:
    """Return the seeds that decide a claim with an effect of the margin, or none."""
    deviation = claim.error * math.sqrt(claim.count)
    return seeds_needed(deviation, claim.margin, claims) if math.isfinite(deviation) else None


def _tail(distance: float, claim: Claim) -> float:
    """One-sided p-value of a mean at this distance on the expected side of a bound."""
    if claim.count < 2:
        return math.nan
    if not claim.error:
        # (without spread the standard error is 0, and the sign decides)
        return 0.5 if distance == 0 else float(distance < 0)
    return float(stats.t.sf(distance / claim.error, claim.count - 1))
