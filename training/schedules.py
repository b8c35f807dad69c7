"""Schedules of the learning rate by name: a factor as a function of the
completed share of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pathspace.errors import InputError

Factor = Callable[[float], float]
NAMES = (
    *("constant", "constant WARM-UP", "linear", "linear WARM-UP", "cosine", "cosine WARM-UP"),
    *("drops AT AT ...", "inverse-root WARM-UP"),
)


def schedule(name: str) -> Factor | None:
    """Return the factor of every learning rate, as a function of the completed
    share of the run's steps.

    Args:
        name: ``constant``; ``linear`` (to zero); ``cosine`` (half a cosine to zero); ``drops 0.5
            0.75`` (divided by ten at each share of the run); ``inverse-root 0.1`` (linearly from
            zero over a tenth of the run, then the inverse root of the steps). ``constant 0.1``,
            ``linear 0.1`` and ``cosine 0.1`` have the same warm-up.

    Returns:
        The factor, ``None`` for ``constant``.

    Raises:
        InputError: there is no such schedule, or a share is not between 0 and 1.

    Example:
        >>> drops = schedule("drops 0.5 0.75")
        >>> drops is not None and [round(drops(share), 3) for share in (0.0, 0.49, 0.5, 0.9)]
        [1.0, 1.0, 0.1, 0.01]
    """
    kind, *words = name.split() or [""]
    try:
        shares = [float(word) for word in words]
    except ValueError:
        shares = [math.nan]
    right = all(0 <= share < 1 for share in shares)
    if kind == "drops" and shares and right:
        return lambda share: 0.1 ** sum(share >= at for at in shares)
    warm = shares[0] if shares else 0.0
    if kind == "inverse-root" and len(shares) == 1 and 0 < warm < 1:
        return lambda share: _warm(share, warm, lambda x: math.sqrt(warm / x))
    if kind == "constant" and not shares:
        return None
    after: dict[str, Factor] = {
        "constant": lambda _: 1.0,
        "linear": lambda x: (1 - x) / (1 - warm),
        "cosine": lambda x: (1 + math.cos(math.pi * (x - warm) / (1 - warm))) / 2,
    }
    if kind in after and len(shares) < 2 and right:
        return lambda share: _warm(share, warm, after[kind])
    raise InputError(
        f"There is no schedule '{name}'; choose one of: {', '.join(NAMES)}, with shares of the run."
    )


def _warm(share: float, until: float, after: Factor) -> float:
    return share / until if share < until else after(share)
