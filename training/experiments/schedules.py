"""Schedules of the learning rate by name."""

from __future__ import annotations

import math
from collections.abc import Callable

from pathspace.errors import InputError

Factor = Callable[[float], float]
NAMES = "constant, constant W, linear, linear W, cosine, cosine W, drops AT AT ..., inverse-root W"


def schedule(name: str) -> Factor | None:
    """Return the factor of every learning rate, as a function of the completed share of a run."""
    kind, *words = name.split() or [""]
    try:
        shares = [float(word) for word in words]
    except ValueError:
        shares = [math.nan]
    right = all(0 <= share < 1 for share in shares)
    if kind == "drops" and shares and right:
        return lambda share: 0.1 ** sum(share >= at for at in shares)
    if kind == "constant" and not shares:
        return None
    warm = shares[0] if shares else 0.0
    after: dict[str, Factor] = {
        "constant": lambda _: 1.0,
        "linear": lambda x: (1 - x) / (1 - warm),
        "cosine": lambda x: (1 + math.cos(math.pi * (x - warm) / (1 - warm))) / 2,
        "inverse-root": lambda x: math.sqrt(warm / x),
    }
    if kind not in after or len(shares) > 1 or not right or (kind == "inverse-root" and not warm):
        raise InputError(
            f"There is no schedule '{name}'; choose one of: {NAMES}, with shares W, AT of the run."
        )
    return lambda share: share / warm if share < warm else after[kind](share)
