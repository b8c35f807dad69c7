"""Which parameters of a test are left to ``make slow``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_names(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Names as parameters of a test; those that take long have the mark."""
    known = list(names)
    assert set(slow) <= set(known), set(slow) - set(known)
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(name, marks=marks[name in slow]) for name in known]
